"""What is happening: sources, the probe that runs on nodes, the columnar store and its immutable snapshots."""
