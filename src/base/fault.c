/* fault.c - see fault.h. One armed point at a time; a lock keeps name and count together. */
#include "fault.h"

#ifdef NEAP_FAULTS

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>

static atomic_bool fault_armed; /* lets unarmed points pass without the lock */
static pthread_mutex_t fault_lock = PTHREAD_MUTEX_INITIALIZER;
static char fault_prefix[64];    /* the rest: fault_lock */
static uint32_t fault_countdown; /* passages left until it fires */
static uint32_t fault_fired_count;
static int fault_err;
static bool fault_sticky;

void neap_fault_arm(const char *prefix, uint32_t n, int err, int sticky) {
    pthread_mutex_lock(&fault_lock);
    strncpy(fault_prefix, prefix, sizeof fault_prefix - 1);
    fault_prefix[sizeof fault_prefix - 1] = '\0';
    fault_countdown = n;
    fault_fired_count = 0;
    fault_err = err;
    fault_sticky = sticky != 0;
    pthread_mutex_unlock(&fault_lock);
    atomic_store(&fault_armed, n > 0);
}

void neap_fault_disarm(void) {
    atomic_store(&fault_armed, false);
}

uint32_t neap_fault_fired(void) {
    pthread_mutex_lock(&fault_lock);
    const uint32_t fired = fault_fired_count;
    pthread_mutex_unlock(&fault_lock);
    return fired;
}

int neap_fault_hit(const char *name) {
    if (!atomic_load(&fault_armed)) return 0;
    int err = 0;
    pthread_mutex_lock(&fault_lock);
    if (strncmp(name, fault_prefix, strlen(fault_prefix)) == 0) {
        if (fault_countdown > 0)
            fault_countdown--;
        else if (!fault_sticky)
            goto out; /* fired before */
        if (fault_countdown == 0) {
            fault_fired_count++;
            err = fault_err;
        }
    }
out:
    pthread_mutex_unlock(&fault_lock);
    return err;
}

#endif
