"""The pipeline in closed form: how long m microbatches take through p stages of v chunks."""

from __future__ import annotations

from engine.model.work import Column


def bubble_s(total_s: Column, slowest_s: Column, interleave: Column) -> Column:
    """Seconds that the slowest stage waits in an iteration.

    1F1B: it works m times and waits while one microbatch passes the other stages, forward and back; with v chunks a
    stage the wait is v times shorter (Narayanan et al., SC'21, section 2.2; Megatron-LM's interleaved schedule).
    `total_s` is one microbatch's time through all stages. Even stages give (p - 1)/v stage times.
    """
    return (total_s - slowest_s) / interleave


def zero_bubble_s(bubble: Column, weight_share: Column) -> Column:
    """The bubble that is left when weight gradients fill it: ZB-H1 waits (p - 1)(F + B - W) instead of
    (p - 1)(F + B + W) (Qi et al. 2023, table 1); `weight_share` is W/(F + B + W)."""
    return bubble * (1.0 - 2.0 * weight_share)
