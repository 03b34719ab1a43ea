#define _GNU_SOURCE
/* A libnvidia-ml.so.1 for tests: the functions that the probe calls, answered from a text file that is read at every
 * call. The file is named by RACKSIDE_FAKE_NVML and holds lines of "key value", for example "gpu0.temperature 61"; a
 * value of "!15" is NVML error 15. Power limits that are set are appended to the same file's name plus ".set", and read
 * back from there. So the real pynvml and the real probe run where there is no GPU.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

typedef struct { int index; } device_t;
typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned int gpu, memory; } utilization_t;
typedef struct {
    char busIdLegacy[16];
    unsigned int domain, bus, device, pciDeviceId, pciSubSystemId;
    char busId[32];
} pci_t;
typedef union { double dVal; int siVal; unsigned int uiVal; unsigned long ulVal; unsigned long long ullVal; long long sllVal; unsigned short usVal; } value_t;
typedef struct {
    unsigned int fieldId, scopeId;
    long long timestamp, latencyUsec;
    int valueType, nvmlReturn;
    value_t value;
} field_t;
typedef struct { unsigned int pid; unsigned long long usedGpuMemory; unsigned int gpuInstanceId, computeInstanceId; } process_t;

static device_t devices[16];

/* A file's text, read again only when it changed: a call costs what NVML's would, not what opening a file does. */
typedef struct { char path[512], *text; ino_t inode; off_t size; struct timespec changed; } kept_t;

static const char *text_of(const char *path) {
    static kept_t kept[2];
    struct stat now;
    if (!path || stat(path, &now)) return NULL;
    kept_t *at = &kept[strlen(path) > 4 && !strcmp(path + strlen(path) - 4, ".set")];
    if (!at->text || strcmp(at->path, path) || at->inode != now.st_ino || at->size != now.st_size ||
        at->changed.tv_sec != now.st_mtim.tv_sec || at->changed.tv_nsec != now.st_mtim.tv_nsec) {
        FILE *file = fopen(path, "r");
        if (!file) return NULL;
        free(at->text);
        at->text = calloc(1, (size_t)now.st_size + 1);
        size_t got = fread(at->text, 1, (size_t)now.st_size, file);
        at->text[got] = 0;
        fclose(file);
        snprintf(at->path, sizeof at->path, "%s", path);
        at->inode = now.st_ino; at->size = now.st_size; at->changed = now.st_mtim;
    }
    return at->text;
}

/* Look a key up; the last line wins. 0 and the number, the NVML error that stands there, or -1: no such key. */
static int look(const char *path, const char *key, double *number, char *text, size_t size) {
    const char *line = text_of(path);
    size_t long_is = strlen(key);
    int result = -1;
    for (; line && *line; line = strchr(line, '\n') ? strchr(line, '\n') + 1 : NULL) {
        if (strncmp(line, key, long_is) || line[long_is] != ' ') continue;
        const char *value = line + long_is + 1;
        if (*value == '!') { result = atoi(value + 1); continue; }
        if (number) *number = atof(value);
        if (text) snprintf(text, size, "%.*s", (int)strcspn(value, "\n"), value);
        result = 0;
    }
    return result;
}

static int find(int index, const char *name, double *number, char *text, size_t size) {
    char key[128];
    snprintf(key, sizeof key, "gpu%d.%s", index, name);
    int result = look(getenv("RACKSIDE_FAKE_NVML"), key, number, text, size);
    return result != -1 ? result : look(getenv("RACKSIDE_FAKE_NVML"), name, number, text, size);
}

/* As find, an absent key being "not supported". */
static int need(int index, const char *name, double *number, char *text, size_t size) {
    int result = find(index, name, number, text, size);
    return result == -1 ? 3 : result;
}

static int whole(device_t *device, const char *name, unsigned int *out) {
    double number = 0;
    int result = need(device->index, name, &number, NULL, 0);
    *out = (unsigned int)number;
    return result;
}

static void set_path(char *out, size_t size) { snprintf(out, size, "%s.set", getenv("RACKSIDE_FAKE_NVML")); }

int nvmlInit_v2(void) { int r = look(getenv("RACKSIDE_FAKE_NVML"), "init", NULL, NULL, 0); return r == -1 ? 0 : r; }
int nvmlInitWithFlags(unsigned int flags) { (void)flags; return nvmlInit_v2(); }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { static char text[64]; snprintf(text, sizeof text, "fake NVML error %d", code); return text; }
int nvmlSystemGetDriverVersion(char *out, unsigned int size) { snprintf(out, size, "580.00.fake"); return 0; }
int nvmlDeviceGetCount_v2(unsigned int *count) { double n = 0; int r = look(getenv("RACKSIDE_FAKE_NVML"), "count", &n, NULL, 0); *count = (unsigned int)n; return r; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, device_t **out) {
    double ignored;
    int r = find((int)index, "handle", &ignored, NULL, 0);
    if (r != -1) return r;
    if (index >= 16) return 2;
    devices[index].index = (int)index;
    *out = &devices[index];
    return 0;
}
int nvmlDeviceGetName(device_t *d, char *out, unsigned int size) { return need(d->index, "name", NULL, out, size); }
/* Boards of two files are not the same boards. */
int nvmlDeviceGetUUID(device_t *d, char *out, unsigned int size) {
    unsigned long hash = 5381;
    for (const char *c = getenv("RACKSIDE_FAKE_NVML"); *c; c++) hash = hash * 33 + (unsigned char)*c;
    snprintf(out, size, "GPU-fake-%016lx-%04d", hash, d->index);
    return 0;
}
int nvmlDeviceGetPciInfo_v3(device_t *d, pci_t *pci) { memset(pci, 0, sizeof *pci); snprintf(pci->busId, sizeof pci->busId, "00000000:%02X:00.0", 0x11 + 0x10 * d->index); return 0; }
int nvmlDeviceGetTemperature(device_t *d, int sensor, unsigned int *out) { (void)sensor; return whole(d, "temperature", out); }
int nvmlDeviceGetTemperatureV(device_t *d, void *out) { int *field = out; double n = 0; int r = need(d->index, "temperature", &n, NULL, 0); field[2] = (int)n; return r; }
int nvmlDeviceGetTemperatureThreshold(device_t *d, int kind, unsigned int *out) { return whole(d, kind == 0 ? "shutdown" : "slowdown", out); }
int nvmlDeviceGetMarginTemperature(device_t *d, void *out) { int *field = out; double n = 0; int r = need(d->index, "margin", &n, NULL, 0); field[1] = (int)n; return r; }
int nvmlDeviceGetPowerUsage(device_t *d, unsigned int *out) { return whole(d, "power", out); }
int nvmlDeviceGetPowerManagementLimit(device_t *d, unsigned int *out) {
    char path[512], key[64];
    double number = 0;
    set_path(path, sizeof path);
    snprintf(key, sizeof key, "gpu%d.limit", d->index);
    if (look(path, key, &number, NULL, 0) == 0) { *out = (unsigned int)number; return 0; }
    return whole(d, "limit", out);
}
int nvmlDeviceGetPowerManagementDefaultLimit(device_t *d, unsigned int *out) { return whole(d, "limit_default", out); }
int nvmlDeviceGetPowerManagementLimitConstraints(device_t *d, unsigned int *low, unsigned int *high) { int r = whole(d, "limit_min", low); return r ? r : whole(d, "limit_max", high); }
int nvmlDeviceSetPowerManagementLimit(device_t *d, unsigned int milliwatts) {
    char path[512];
    double ignored;
    int r = find(d->index, "limit_set", &ignored, NULL, 0);
    if (r > 0) return r;
    if (r == 0) return 0; /* claims success and does nothing */
    set_path(path, sizeof path);
    FILE *file = fopen(path, "a");
    if (!file) return 4;
    fprintf(file, "gpu%d.limit %u\n", d->index, milliwatts);
    fclose(file);
    return 0;
}
static int lock_clock(device_t *d, unsigned int mhz) {
    char path[512];
    double ignored;
    int r = find(d->index, "clock_set", &ignored, NULL, 0);
    if (r > 0) return r;
    if (r == 0) return 0; /* claims success and does nothing */
    set_path(path, sizeof path);
    FILE *file = fopen(path, "a");
    if (!file) return 4;
    fprintf(file, "gpu%d.lock %u\n", d->index, mhz);
    fclose(file);
    return 0;
}
int nvmlDeviceSetGpuLockedClocks(device_t *d, unsigned int low, unsigned int high) { return low > high ? 2 : lock_clock(d, high); }
int nvmlDeviceResetGpuLockedClocks(device_t *d) { return lock_clock(d, 0); }
int nvmlDeviceGetClockInfo(device_t *d, int kind, unsigned int *out) {
    char path[512], key[64];
    double lock = 0;
    int r = whole(d, kind == 1 ? "sm_clock" : "memory_clock", out);
    set_path(path, sizeof path);
    snprintf(key, sizeof key, "gpu%d.lock", d->index);
    if (!r && kind == 1 && look(path, key, &lock, NULL, 0) == 0 && lock > 0 && *out > lock) *out = (unsigned int)lock;
    return r;
}
int nvmlDeviceGetMaxClockInfo(device_t *d, int kind, unsigned int *out) { (void)kind; return whole(d, "sm_clock_max", out); }
int nvmlDeviceGetMaxPcieLinkGeneration(device_t *d, unsigned int *out) { return whole(d, "pcie_gen", out); }
int nvmlDeviceGetMaxPcieLinkWidth(device_t *d, unsigned int *out) { return whole(d, "pcie_width", out); }
int nvmlDeviceGetUtilizationRates(device_t *d, utilization_t *out) { out->memory = 0; return whole(d, "utilization", &out->gpu); }
int nvmlDeviceGetMemoryInfo(device_t *d, memory_t *out) {
    double total = 0, used = 0;
    int r = need(d->index, "memory_total", &total, NULL, 0);
    if (!r) r = need(d->index, "memory_used", &used, NULL, 0);
    out->total = (unsigned long long)total; out->used = (unsigned long long)used; out->free = out->total - out->used;
    return r;
}
int nvmlDeviceGetCurrentClocksEventReasons(device_t *d, unsigned long long *out) { unsigned int n = 0; int r = whole(d, "throttle", &n); *out = n; return r; }
int nvmlDeviceGetTotalEnergyConsumption(device_t *d, unsigned long long *out) { double n = 0; int r = need(d->index, "energy", &n, NULL, 0); *out = (unsigned long long)n; return r; }
int nvmlDeviceGetNvLinkState(device_t *d, unsigned int link, unsigned int *out) {
    double count = 0, state = 1;
    char key[64];
    if (find(d->index, "nvlinks", &count, NULL, 0)) return 3;
    if (link >= (unsigned int)count) return 2;
    snprintf(key, sizeof key, "nvlink%u.active", link);
    if (find(d->index, key, &state, NULL, 0)) state = 1;
    *out = (unsigned int)state;
    return 0;
}
int nvmlDeviceGetPcieThroughput(device_t *d, int counter, unsigned int *out) { (void)counter; return whole(d, "pcie_kb_s", out); }
int nvmlDeviceGetFieldValues(device_t *d, int count, field_t *fields) {
    for (int i = 0; i < count; i++) {
        char key[64];
        double number = 0;
        snprintf(key, sizeof key, "field%u", fields[i].fieldId);
        fields[i].valueType = 3;
        fields[i].nvmlReturn = need(d->index, key, &number, NULL, 0);
        fields[i].value.ullVal = (unsigned long long)number;
    }
    return 0;
}
int nvmlDeviceGetComputeRunningProcesses_v3(device_t *d, unsigned int *count, process_t *out) {
    double pid = 0, used = 0;
    if (find(d->index, "pid", &pid, NULL, 0)) { *count = 0; return 0; }
    find(d->index, "pid_memory", &used, NULL, 0);
    if (*count < 1 || !out) { *count = 1; return 7; }
    out[0].pid = (unsigned int)pid; out[0].usedGpuMemory = (unsigned long long)used; *count = 1;
    return 0;
}
int nvmlDeviceGetPersistenceMode(device_t *d, unsigned int *out) { return whole(d, "persistence", out); }
int nvmlDeviceGetCurrPcieLinkWidth(device_t *d, unsigned int *out) { int r = whole(d, "pcie_width_now", out); return r == 3 ? whole(d, "pcie_width", out) : r; }
int nvmlDeviceGetNvLinkRemoteDeviceType(device_t *d, unsigned int link, unsigned int *out) { (void)link; return whole(d, "nvlink_to", out); }
int nvmlDeviceGetIndex(device_t *d, unsigned int *out) { *out = (unsigned int)d->index; return 0; }

/* MIG: "gpu0.mig 2" gives GPU 0 two instances, whose readings stand under gpu8 and gpu9 (and so on, two a GPU). */
int nvmlDeviceGetMigMode(device_t *d, unsigned int *now, unsigned int *pending) { int r = whole(d, "mig", now); *now = *pending = *now > 0; return r; }
int nvmlDeviceGetMaxMigDeviceCount(device_t *d, unsigned int *out) { return whole(d, "mig", out); }
int nvmlDeviceGetMigDeviceHandleByIndex(device_t *d, unsigned int place, device_t **out) {
    unsigned int count = 0;
    if (whole(d, "mig", &count) || place >= count || place > 1 || d->index > 3) return 6;
    devices[8 + 2 * d->index + place].index = 8 + 2 * d->index + place;
    *out = &devices[8 + 2 * d->index + place];
    return 0;
}
int nvmlDeviceGetGpuInstanceId(device_t *d, unsigned int *out) { *out = (unsigned int)d->index; return 0; }
int nvmlDeviceGetComputeInstanceId(device_t *d, unsigned int *out) { (void)d; *out = 0; return 0; }

/* Critical events: "gpu0.xid 79" is told once. */
typedef struct { device_t *device; unsigned long long eventType, eventData; unsigned int gpuInstanceId, computeInstanceId; } event_t;
static double told[16];
int nvmlEventSetCreate(void **set) { static int any; *set = &any; return 0; }
int nvmlDeviceRegisterEvents(device_t *d, unsigned long long types, void *set) { (void)d; (void)types; (void)set; return 0; }
int nvmlEventSetWait_v2(void *set, event_t *out, unsigned int ms) {
    (void)set; (void)ms;
    for (int i = 0; i < 8; i++) {
        double xid = 0;
        char key[64];
        snprintf(key, sizeof key, "gpu%d.xid", i);
        if (look(getenv("RACKSIDE_FAKE_NVML"), key, &xid, NULL, 0) || xid == told[i]) continue;
        told[i] = xid;
        devices[i].index = i;
        out->device = &devices[i]; out->eventType = 8; out->eventData = (unsigned long long)xid;
        return 0;
    }
    return 10;
}
