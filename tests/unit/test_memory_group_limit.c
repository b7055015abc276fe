/* test_memory_group_limit.c - a real memory group (cgroup v1) with a limit: the sensor finds it,
 * also after the process was moved into it, says when usage nears the limit before anyone is
 * killed, wakes seldom in a storm of notices, and tells again when memory is back. */
#include "sensor.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "clock.h"
#include "memory_files.h"
#include "temp.h"

#define MIB ((uint64_t)1 << 20)
#define MS 1000000ull
#define LIMIT (192 * MIB) /* low 16, enough 32, near 64 MiB */
#define TOLD (66 * MIB)   /* near, and what the kernel charges in batches */

static char group[300];

static bool put(const char *name, const char *text) {
    char path[400];
    snprintf(path, sizeof path, "%s/%s", group, name);
    const int fd = open(path, O_WRONLY);
    if (fd < 0) return false;
    const bool ok = write(fd, text, strlen(text)) == (ssize_t)strlen(text);
    close(fd);
    return ok;
}

/* Into the group: this process. */
static void enter(void) {
    char text[32];
    snprintf(text, sizeof text, "%d", (int)getpid());
    CHECK(put("cgroup.procs", text));
}

static neap_pressure_signals look(neap_pressure_sensor *sensor, uint64_t wait_ns) {
    neap_pressure_signals signals;
    neap_pressure_sensor_wait(sensor, wait_ns ? neap_clock_ns() + wait_ns : 0);
    CHECK(neap_pressure_sensor_read(sensor, &signals) == 0);
    return signals;
}

static int child(bool move_later) {
    neap_pressure_sensor *sensor;
    char text[64];
    if (!move_later) enter();
    CHECK(neap_pressure_sensor_open("", NULL, NULL, &sensor) == 0);
    if (move_later) enter();
    neap_pressure_signals s = look(sensor, 0);
    CHECK(s.group.size_bytes == LIMIT && s.group.available_bytes > 150 * MIB);
    neap_pressure_sensor_describe(sensor, text, sizeof text);
    CHECK(strstr(text, "cgroup v1"));

    char *memory = mmap(NULL, LIMIT, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    uint64_t dirty = 0, told_at = 0;
    for (; dirty < LIMIT - 20 * MIB; dirty += MIB) {
        memset(memory + dirty, 1, MIB);
        s = look(sensor, 0);
        /* Stalls of the whole machine wake it, too, whenever they happen. */
        if (s.woken && told_at == 0 && s.group.available_bytes <= TOLD)
            told_at = s.group.available_bytes;
    }
    printf("first told with %.1f MiB left of %.0f\n", (double)told_at / (double)MIB,
           (double)LIMIT / (double)MIB);
    CHECK(told_at > TOLD - 20 * MIB);

    /* A storm: reading a file through the page cache, at the limit, keeps reclaim running. */
    char path[] = "/var/tmp/neap-test-XXXXXX", block[65536] = {1};
    const int fd = mkstemp(path);
    CHECK(fd >= 0 && unlink(path) == 0);
    const uint64_t began_ns = neap_clock_ns();
    int wakes = 0;
    for (int i = 0; neap_clock_ns() < began_ns + 1000 * MS; i++) {
        if (write(fd, block, sizeof block) < 0 || i % 512 == 511) CHECK(ftruncate(fd, 0) == 0);
        if (i % 512 == 511) lseek(fd, 0, SEEK_SET);
        wakes += look(sensor, 0).woken;
    }
    printf("%d wake-ups in a second at the limit\n", wakes);
    CHECK(wakes <= 6 * 21); /* each source rests 50 ms */
    close(fd);

    CHECK(madvise(memory, LIMIT, MADV_DONTNEED) == 0);
    s = look(sensor, 100 * MS);
    CHECK(s.group.available_bytes > 150 * MIB);
    neap_pressure_sensor_close(sensor);
    return 0;
}

static bool run(bool move_later) {
    fflush(stdout);
    const pid_t pid = fork();
    int status;
    if (pid == 0) {
        const int failed = child(move_later);
        fflush(stdout);
        _exit(failed);
    }
    CHECK(pid > 0 && waitpid(pid, &status, 0) == pid);
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

int main(void) {
#if defined(__SANITIZE_THREAD__)
    SKIP("the thread sanitizer's own memory does not fit into the group");
#endif
    char limit[32];
    snprintf(group, sizeof group, "/sys/fs/cgroup/memory/neap-test-%d", (int)getpid());
    if (mkdir(group, 0700) != 0) SKIP("no memory group of cgroup v1 can be made here");
    snprintf(limit, sizeof limit, "%llu", (unsigned long long)LIMIT);
    if (!put("memory.limit_in_bytes", limit)) {
        rmdir(group);
        SKIP("the memory group takes no limit");
    }
    const bool ok = run(false) && run(true);
    for (int i = 0; rmdir(group) != 0 && i < 100; i++)
        usleep(10000);
    CHECK(ok);
    return 0;
}
