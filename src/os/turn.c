/* turn.c - see turn.h. The kernel gives the turn of a dead process back. */
#include "turn.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <sys/file.h>
#include <time.h>
#include <unistd.h>

#include "clock.h"
#include "fault.h"
#include "proc.h"

#define RETRY_NS 10000000u

int neap_turn_open(const char *name, int *ret_turn) {
    char folder[PATH_MAX], path[PATH_MAX];
    int err = NEAP_FAULT("turn.open");
    if (!err) err = neap_runtime_dir(folder, sizeof folder);
    if (err) return err;
    const int len = snprintf(path, sizeof path, "%s/%s", folder, name);
    if (len < 0 || len >= (int)sizeof path) return -ENAMETOOLONG;
    const int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0) return -errno;
    *ret_turn = fd;
    return 0;
}

void neap_turn_close(int turn) {
    if (turn >= 0) close(turn);
}

bool neap_turn_take(int turn, uint64_t at_most_ns) {
    const uint64_t until_ns = neap_clock_ns() + at_most_ns;
    const struct timespec retry = {.tv_nsec = RETRY_NS};
    while (flock(turn, LOCK_EX | LOCK_NB) != 0) {
        if ((errno != EWOULDBLOCK && errno != EINTR) || neap_clock_ns() >= until_ns) return false;
        nanosleep(&retry, NULL);
    }
    return true;
}

void neap_turn_give(int turn) {
    flock(turn, LOCK_UN);
}

bool neap_turn_taken(int turn) {
    if (flock(turn, LOCK_SH | LOCK_NB) != 0) return errno == EWOULDBLOCK;
    flock(turn, LOCK_UN);
    return false;
}
