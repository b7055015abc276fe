/* test_memory_group_stall.c - real PSI of a real group: a process in a group of cgroup v2, held
 * short by a limit of v1, is told of its own stalls and of the machine's. */
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "clock.h"
#include "memory_events.h"
#include "temp.h"

#define MIB ((uint64_t)1 << 20)
#define S 1000000000ull
#define LIMIT (32 * MIB)
#define FILE_BYTES (64 * MIB)

static char group[2][300];

static bool put(const char *dir, const char *name, uint64_t value) {
    char path[400], text[32];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    snprintf(text, sizeof text, "%llu", (unsigned long long)value);
    const int fd = open(path, O_WRONLY);
    if (fd < 0) return false;
    const bool ok = write(fd, text, strlen(text)) == (ssize_t)strlen(text);
    close(fd);
    return ok;
}

/* Reads a file larger than the limit again and again: every page has to come back. */
static int child(void) {
    CHECK(put(group[0], "cgroup.procs", (uint64_t)getpid()));
    CHECK(put(group[1], "cgroup.procs", (uint64_t)getpid()));
    neap_memory_files *files;
    neap_memory_events *events;
    neap_memory_reading reading;
    CHECK(neap_memory_files_open("", &files) == 0);
    CHECK(strstr(neap_memory_files_group_stall_path(files), group[1]));
    CHECK(neap_memory_events_open(NULL, NULL, &events) == 0);
    neap_memory_events_listen(events, files);
    if ((neap_memory_events_sources(events) & NEAP_MEMORY_GROUP_STALL) == 0) return 77;

    char path[] = "/var/tmp/neap-test-XXXXXX";
    static char block[1 << 20];
    const int fd = mkstemp(path);
    CHECK(fd >= 0 && unlink(path) == 0);
    unsigned happened = 0;
    const uint64_t until_ns = neap_clock_ns() + 40 * S;
    uint64_t at = 0;
    while (!(happened & NEAP_MEMORY_GROUP_STALL) && neap_clock_ns() < until_ns) {
        if (at < FILE_BYTES)
            CHECK(write(fd, block, sizeof block) == (ssize_t)sizeof block);
        else
            CHECK(pread(fd, block, sizeof block, (off_t)(at % FILE_BYTES)) >= 0);
        at += sizeof block;
        happened |= neap_memory_events_wait(events, 0);
    }
    CHECK(neap_memory_files_read(files, &reading) == 0);
    printf("told %#x after %.0f MiB, some %u permille\n", happened, (double)at / (double)MIB,
           reading.group_stall.some_permille);
    CHECK(happened & NEAP_MEMORY_GROUP_STALL);
    close(fd);
    neap_memory_events_close(events);
    neap_memory_files_close(files);
    return 0;
}

int main(void) {
    snprintf(group[0], sizeof group[0], "/sys/fs/cgroup/memory/neap-stall-%d", (int)getpid());
    snprintf(group[1], sizeof group[1], "/sys/fs/cgroup/unified/neap-stall-%d", (int)getpid());
    if (mkdir(group[0], 0700) != 0) SKIP("no memory group of cgroup v1 can be made here");
    if (mkdir(group[1], 0700) != 0) {
        rmdir(group[0]);
        SKIP("no group of cgroup v2 can be made here");
    }
    CHECK(put(group[0], "memory.limit_in_bytes", LIMIT));
    fflush(stdout);
    const pid_t pid = fork();
    int status = 0;
    if (pid == 0) {
        const int result = child();
        fflush(stdout);
        _exit(result);
    }
    const bool ended = pid > 0 && waitpid(pid, &status, 0) == pid;
    for (int i = 0; i < 2; i++)
        for (int n = 0; rmdir(group[i]) != 0 && n < 100; n++)
            usleep(10000);
    CHECK(ended && WIFEXITED(status));
    if (WEXITSTATUS(status) == 77) SKIP("no PSI of groups here");
    CHECK(WEXITSTATUS(status) == 0);
    return 0;
}
