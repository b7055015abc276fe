/* stack.h - the in-memory swap: LIFO of encoded chunks in segments that go back to the kernel as
 * they empty. Records may be freed in any order; memory returns when a segment has no live record.
 * Threads   all calls take an internal lock; a record's bytes may be read while it is live. */
#ifndef NEAP_STORE_STACK_H
#define NEAP_STORE_STACK_H

#include <stddef.h>
#include <stdint.h>

typedef struct neap_stack neap_stack;
typedef struct neap_stack_record neap_stack_record;

int neap_stack_create(neap_stack **ret_stack);
void neap_stack_free(neap_stack *stack); /* all records with it; takes NULL */
/* Room for len bytes on top; the caller writes into *ret_bytes. Fails: -ENOMEM. */
int neap_stack_push(neap_stack *stack, size_t len, neap_stack_record **ret_record,
                    void **ret_bytes);
/* Says that about so many bytes are going to be pushed: segments that they fill are of huge pages,
 * which cost a quarter of the time to commit. 0: no more; what is committed above the records goes
 * back. */
void neap_stack_expect(neap_stack *stack, uint64_t bytes);
const void *neap_stack_bytes(const neap_stack_record *record, size_t *ret_len);
void neap_stack_drop(neap_stack *stack, neap_stack_record *record);
/* Bytes of live records, and bytes of address range committed for them. */
void neap_stack_usage(neap_stack *stack, uint64_t *ret_live, uint64_t *ret_committed);
void neap_stack_check(neap_stack *stack); /* invariants; aborts */
#endif
