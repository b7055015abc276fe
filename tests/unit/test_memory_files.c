/* test_memory_files.c - meminfo, PSI and memory groups from folders of fixtures: cgroup v1, v2,
 * both, containers, limits above the own group, odd and broken files; reading allocates nothing. */
#include "memory_files.h"

#include <errno.h>
#include <unistd.h>

#include "check.h"
#include "fault.h"
#include "sensor.h"
#include "temp.h"

#define MIB ((uint64_t)1 << 20)

/* Counts what the program allocates; a sanitizer has an allocator of its own. */
static long n_allocated;
#if defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define COUNTS_ALLOCATIONS 1
extern void *__libc_malloc(size_t size);
void *malloc(size_t size) {
    n_allocated++;
    return __libc_malloc(size);
}
#endif

static char *root;

static void put(const char *path, const char *text) {
    char whole[1024], command[1100];
    snprintf(whole, sizeof whole, "%s%s", root, path);
    snprintf(command, sizeof command, "mkdir -p \"$(dirname '%s')\"", whole);
    CHECK(system(command) == 0);
    FILE *file = fopen(whole, "w");
    CHECK(file && fputs(text, file) >= 0 && fclose(file) == 0);
}

static void begin(void) {
    root = temp_dir();
    put("/proc/meminfo", "MemTotal:       16384 kB\nMemFree:  1 kB\nMemAvailable:    8192 kB\n");
    put("/proc/pressure/memory", "some avg10=12.34 avg60=1.00 avg300=0.00 total=3713\n"
                                 "full avg10=1.05 avg60=0.00 avg300=0.00 total=1968\n");
}

static neap_memory_reading read_once(int version, size_t n_levels) {
    neap_memory_files *files;
    neap_memory_reading reading;
    CHECK(neap_memory_files_open(root, &files) == 0);
    CHECK(neap_memory_files_version(files) == version && !neap_memory_files_is_live(files));
    CHECK(neap_memory_files_n_levels(files) == n_levels);
    const long before = n_allocated;
    CHECK(neap_memory_files_read(files, &reading) == 0);
    CHECK(!neap_memory_files_follow(files));
    CHECK(n_allocated == before);
    neap_memory_files_close(files);
    return reading;
}

static void machine_alone(void) {
    begin();
    const neap_memory_reading r = read_once(0, 0);
    CHECK(r.total_bytes == 16 * MIB && r.available_bytes == 8 * MIB);
    CHECK(r.machine_stall.some_permille == 123 && r.machine_stall.full_permille == 10);
    CHECK(r.group_stall.some_permille == 0);
    put("/proc/pressure/memory", "some avg10=100.00 avg60=1.00\nfull avg10=99.99\n");
    const neap_memory_reading full = read_once(0, 0);
    CHECK(full.machine_stall.some_permille == 1000 && full.machine_stall.full_permille == 999);
    put("/proc/pressure/memory", "some avg10=x\nfull");
    put("/proc/meminfo", "MemTotal: 16384 kB\nMemAvailable: none\n");
    const neap_memory_reading broken = read_once(0, 0);
    CHECK(broken.total_bytes == 0 && broken.machine_stall.some_permille == 0);
    temp_remove(root);
    root = temp_dir(); /* nothing at all */
    neap_memory_files *files = NULL;
    CHECK(neap_memory_files_open(root, &files) == -ENOENT && !files);
    temp_remove(root);
}

static void cgroup_v1(void) {
    begin();
    put("/proc/self/cgroup", "9:name=systemd:/\n4:cpu,memory:/user/my app\n0::/\n");
    put("/proc/self/mountinfo", "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n"
                                "35 31 0:32 / /sys/fs/cgroup/memo\\040ry rw,relatime shared:9 - "
                                "cgroup cgroup rw,cpu,memory\n"
                                "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n");
    put("/sys/fs/cgroup/memo ry/user/my app/memory.usage_in_bytes", "104857600\n");
    put("/sys/fs/cgroup/memo ry/user/my app/memory.limit_in_bytes", "9223372036854771712\n");
    put("/sys/fs/cgroup/memo ry/user/memory.usage_in_bytes", "209715200\n");
    put("/sys/fs/cgroup/memo ry/user/memory.limit_in_bytes", "268435456\n");
    put("/sys/fs/cgroup/memo ry/user/memory.stat",
        "cache 1\ninactive_file 7\ntotal_inactive_file 10485760\ntotal_active_file 20971520\n");
    put("/sys/fs/cgroup/memo ry/memory.usage_in_bytes", "1\n");
    put("/sys/fs/cgroup/memo ry/memory.limit_in_bytes", "9223372036854771712\n");
    put("/sys/fs/cgroup/unified/memory.pressure", "some avg10=50.00\nfull avg10=50.00\n");
    const neap_memory_reading r = read_once(1, 2); /* the own one, and that which has a limit */
    CHECK(r.levels[0].limit_bytes == 0 && r.levels[0].usage_bytes == 100 * MIB);
    CHECK(r.levels[1].limit_bytes == 256 * MIB);
    CHECK(r.levels[1].available_bytes == (56 + 10 + 10) * MIB);
    CHECK(r.group_stall.some_permille == 0); /* that of the root is the machine's */
    temp_remove(root);
}

static void cgroup_v2(void) {
    begin();
    put("/proc/self/cgroup", "0::/user.slice/app.service\n");
    put("/proc/self/mountinfo",
        "25 30 0:23 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw\n");
    const char *app = "/sys/fs/cgroup/user.slice/app.service/";
    char path[200];
    const struct {
        const char *name, *text;
    } contents[] = {{"memory.current", "94371840\n"},
                    {"memory.max", "max\n"},
                    {"memory.high", "104857600\n"},
                    {"memory.stat", "anon 5\ninactive_file 1048576\nactive_file 0\n"},
                    {"memory.pressure", "some avg10=3.20 avg60=0\nfull avg10=0.40 avg60=0\n"}};
    for (size_t i = 0; i < sizeof contents / sizeof *contents; i++) {
        snprintf(path, sizeof path, "%s%s", app, contents[i].name);
        put(path, contents[i].text);
    }
    put("/sys/fs/cgroup/user.slice/memory.current", "94371840\n");
    put("/sys/fs/cgroup/user.slice/memory.max", "2147483648\n");
    put("/sys/fs/cgroup/user.slice/memory.high", "max\n");
    put("/sys/fs/cgroup/user.slice/memory.stat", "");
    const neap_memory_reading r = read_once(2, 2);
    CHECK(r.levels[0].limit_bytes == 100 * MIB && r.levels[0].available_bytes == 11 * MIB);
    CHECK(r.levels[1].limit_bytes == 2048 * MIB && r.levels[1].available_bytes == 1958 * MIB);
    CHECK(r.group_stall.some_permille == 32 && r.group_stall.full_permille == 4);

    neap_pressure_sensor *sensor; /* the tightest is the group; no events in fixtures */
    neap_pressure_signals signals;
    char text[64];
    CHECK(neap_pressure_sensor_open(root, NULL, NULL, &sensor) == 0);
    const long before = n_allocated;
    CHECK(neap_pressure_sensor_read(sensor, &signals) == 0 && n_allocated == before);
    CHECK(signals.group.size_bytes == 100 * MIB && signals.group.available_bytes == 11 * MIB);
    CHECK(signals.group.some_permille == 32 && signals.machine.available_bytes == 8 * MIB);
    CHECK(signals.blind && !signals.woken && !signals.told);
    neap_pressure_sensor_describe(sensor, text, sizeof text);
    CHECK(strcmp(text, "polling") == 0);
    put("/proc/self/cgroup", "0::/user.slice\n"); /* moved */
    CHECK(neap_pressure_sensor_read(sensor, &signals) == 0);
    CHECK(signals.group.size_bytes == 2048 * MIB);
    neap_pressure_sensor_close(sensor);

    put("/sys/fs/cgroup/user.slice/memory.max", "max\n"); /* no limit anywhere */
    put("/proc/self/cgroup", "0::/user.slice/app.service\n");
    snprintf(path, sizeof path, "%smemory.high", app);
    put(path, "max\n");
    CHECK(read_once(2, 1).levels[0].limit_bytes == 0);
    temp_remove(root);
}

static void containers(void) {
    begin(); /* the group's own folder is what is mounted */
    put("/proc/self/cgroup", "4:memory:/docker/abc/inner\n");
    put("/proc/self/mountinfo",
        "35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n");
    put("/sys/fs/cgroup/memory/memory.usage_in_bytes", "1048576\n");
    put("/sys/fs/cgroup/memory/memory.limit_in_bytes", "4194304\n");
    put("/sys/fs/cgroup/memory/inner/memory.usage_in_bytes", "1048576\n");
    put("/sys/fs/cgroup/memory/inner/memory.limit_in_bytes", "2097152\n");
    neap_memory_reading r = read_once(1, 2);
    CHECK(r.levels[0].available_bytes == MIB && r.levels[1].available_bytes == 3 * MIB);
    put("/proc/self/cgroup", "4:memory:/docker/abcdef\n"); /* a neighbour's name, not below */
    r = read_once(1, 1);
    CHECK(r.levels[0].limit_bytes == 4 * MIB);
    put("/proc/self/cgroup", "4:memory:/docker/abc/gone\n"); /* removed: those above still count */
    r = read_once(1, 1);
    CHECK(r.levels[0].limit_bytes == 4 * MIB);
    put("/proc/self/cgroup", "garbage\n::\n4:memory\n");
    CHECK(read_once(0, 0).n_levels == 0);
    put("/proc/self/mountinfo", "1 2 3\n - cgroup\n35 31 0:32 / - cgroup cgroup rw,memory\n");
    put("/proc/self/cgroup", "4:memory:/\n0::/\n");
    CHECK(read_once(0, 0).n_levels == 0);
    temp_remove(root);
}

static void long_lines(void) {
    begin();
    static char text[40000];
    memset(text, 'x', 20000);
    snprintf(text + 20000, sizeof text - 20000,
             "\n35 31 0:32 / /cg rw - cgroup cgroup rw,memory\n");
    put("/proc/self/mountinfo", text);
    memset(text, 'y', 20000);
    snprintf(text + 20000, sizeof text - 20000, "\n4:memory:/a\n");
    put("/proc/self/cgroup", text);
    put("/cg/a/memory.usage_in_bytes", "0\n");
    put("/cg/a/memory.limit_in_bytes", "1048576\n");
    CHECK(read_once(1, 1).levels[0].available_bytes == MIB);
    temp_remove(root);
}

static void faults(void) {
    begin();
    put("/proc/self/cgroup", "0::/a\n");
    put("/proc/self/mountinfo", "25 30 0:23 / /cg rw - cgroup2 cgroup2 rw\n");
    put("/cg/a/memory.current", "1\n");
    put("/cg/a/memory.max", "5\n");
    for (uint32_t n = 1;; n++) {
        neap_memory_files *files = NULL;
        neap_fault_arm("memory.", n, -EIO, 0);
        const int err = neap_memory_files_open(root, &files);
        const uint32_t fired = neap_fault_fired();
        neap_fault_disarm();
        CHECK(err == 0 || err == -EIO || err == -ENOENT);
        neap_memory_files_close(files);
        if (fired == 0) break;
        CHECK(n < 100);
    }
    temp_remove(root);
}

int main(void) {
    machine_alone();
    cgroup_v1();
    cgroup_v2();
    containers();
    long_lines();
    faults();
#ifndef COUNTS_ALLOCATIONS
    printf("allocations were not counted\n");
#endif
    return 0;
}
