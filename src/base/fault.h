/* fault.h - fault points: places where a test makes the n-th system call fail.
 * In builds without NEAP_FAULTS the macro is 0 and nothing remains of it.
 * Threads   counters are atomic; arm and disarm from one thread. */
#ifndef NEAP_BASE_FAULT_H
#define NEAP_BASE_FAULT_H

#include <stdint.h>

#ifdef NEAP_FAULTS
/* Makes the n-th (1 = next) passage of a fault point whose name starts with prefix return err
 * (negative errno), and all later ones too when sticky. prefix "" matches all. */
void neap_fault_arm(const char *prefix, uint32_t n, int err, int sticky);
void neap_fault_disarm(void);
uint32_t neap_fault_fired(void); /* since the last arm */
int neap_fault_hit(const char *name);
#define NEAP_FAULT(name) neap_fault_hit(name)
#else
#define NEAP_FAULT(name) 0
#endif
#endif
