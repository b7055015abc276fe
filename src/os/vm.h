/* vm.h - virtual memory of this process.
 * Errors    0 or -errno. Addresses and lengths are multiples of the page size unless said. */
#ifndef NEAP_OS_VM_H
#define NEAP_OS_VM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

size_t neap_vm_page(void);
/* Reserves len bytes, aligned to align (a power of two >= page); reads as zero, commits on write.
 */
int neap_vm_reserve(size_t len, size_t align, void **ret_addr);
void neap_vm_unmap(void *addr, size_t len);
/* Gives the pages back to the kernel; the range reads as zero afterwards. */
int neap_vm_drop(void *addr, size_t len);
/* Commits the range, zero-filled, without a page fault for each page (MADV_POPULATE_WRITE where the
 * kernel has it, else a touch of each page). */
int neap_vm_populate(void *addr, size_t len);
/* The same of a range of which nothing is held, with huge pages wherever a whole one lies within it
 * (where pages of it were held before, from Linux 6.14 on). */
#define NEAP_HUGE_PAGE ((size_t)2 << 20)
/* Whether that is the faster way on this machine; the second is for tests. */
bool neap_vm_prefers_huge(void);
void neap_vm_set_prefers_huge(bool prefers);
int neap_vm_populate_huge(void *addr, size_t len);
int neap_vm_protect(void *addr, size_t len, bool accessible);
/* Asks for huge pages (true) or none (false). Advice: failure is not an error. */
void neap_vm_huge(void *addr, size_t len, bool huge);
/* Splits the huge page around the page of addr, so that its other pages really go back when they
 * are dropped: a huge page of which one page is kept stays whole until the kernel runs short. */
void neap_vm_split(const void *addr);
/* Bytes of the range that are present in memory (pagemap: present or swapped count as held; so does
 * a page that was only read, the kernel's shared zero page). */
int neap_vm_held(const void *addr, size_t len, uint64_t *ret_bytes);
/* For a file-backed address: path of the mapping and the file offset of addr.
 * Fails: -ENOENT (anonymous or unmapped). */
int neap_vm_mapping(const void *addr, char *ret_path, size_t cap, uint64_t *ret_offset);
#endif
