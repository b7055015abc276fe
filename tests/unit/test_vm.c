/* test_vm.c - reserve, populate, drop, protect, account, and where an address is mapped from. */
#include "vm.h"

#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "check.h"
#include "fault.h"
#include "proc.h"

static uint64_t held(const void *addr, size_t len) {
    uint64_t bytes = 0;
    CHECK(neap_vm_held(addr, len, &bytes) == 0);
    return bytes;
}

static void test_reserve(void) {
    const size_t page = neap_vm_page(), align = 2u << 20;
    CHECK(page >= 4096 && (page & (page - 1)) == 0);
    for (size_t i = 1; i < 40; i += 6) {
        void *addr;
        CHECK(neap_vm_reserve(i * page, align, &addr) == 0);
        CHECK((uintptr_t)addr % align == 0 && held(addr, i * page) == 0);
        memset(addr, 1, i * page);
        neap_vm_unmap(addr, i * page);
    }
    void *addr = &addr;
    CHECK(neap_vm_reserve(0, page, &addr) == -EINVAL);
    CHECK(neap_vm_reserve(page, page / 2, &addr) == -EINVAL);
    CHECK(neap_vm_reserve(page, page * 3, &addr) == -EINVAL);
    CHECK(neap_vm_reserve(SIZE_MAX - page, align, &addr) == -ENOMEM);
    CHECK(neap_vm_reserve((size_t)1 << 60, page, &addr) == -ENOMEM);
    neap_fault_arm("vm.reserve", 1, -ENOMEM, 0);
    CHECK(neap_vm_reserve(page, page, &addr) == -ENOMEM && addr == &addr);
    neap_fault_disarm();
}

/* More than memory and swap together can be reserved, as long as little is touched. */
static void test_reserve_is_lazy(void) {
    uint64_t available, total;
    CHECK(neap_mem_available(&available, &total) == 0);
    const size_t len = (size_t)(total / 4096 * 4096 * 2);
    void *addr;
    const int err = neap_vm_reserve(len, neap_vm_page(), &addr);
    if (err == -ENOMEM) return; /* vm.overcommit_memory = 2, or an address-space limit */
    CHECK(err == 0);
    *((char *)addr + len - 1) = 1;
    CHECK(held(addr, len) == neap_vm_page());
    neap_vm_unmap(addr, len);
}

static void test_commit(void) {
    const size_t page = neap_vm_page(), len = 10000 * page;
    char *addr;
    CHECK(neap_vm_reserve(len, page, (void **)&addr) == 0);
    neap_vm_huge(addr, len, false);
    addr[page] = 1;
    addr[9999 * page] = 2;
    CHECK(held(addr, len) == 2 * page && held(addr, page) == 0);
    CHECK(neap_vm_populate(addr, 5000 * page) == 0);
    CHECK(held(addr, len) == 5001 * page);
    CHECK(addr[page] == 1 && addr[2 * page] == 0); /* populating changes nothing */
    CHECK(neap_vm_drop(addr + page, 4999 * page) == 0);
    CHECK(held(addr, len) == 2 * page && addr[page] == 0 && addr[9999 * page] == 2);
    neap_vm_unmap(addr, len);
}

/* What drop says it gives back, the kernel counts as given back. */
static void test_drop_counts(void) {
    const size_t len = (size_t)64 << 20;
    char *addr;
    neap_proc_memory before, full, after;
    CHECK(neap_vm_reserve(len, 2u << 20, (void **)&addr) == 0);
    for (int huge = 0; huge < 2; huge++) {
        neap_vm_huge(addr, len, huge != 0);
        CHECK(neap_proc_memory_read(0, &before) == 0);
        CHECK(neap_vm_populate(addr, len) == 0);
        CHECK(neap_proc_memory_read(0, &full) == 0);
        CHECK(neap_vm_drop(addr, len) == 0);
        CHECK(neap_proc_memory_read(0, &after) == 0);
        const double grown = (double)(full.anon_bytes + full.swap_bytes) -
                             (double)(before.anon_bytes + before.swap_bytes);
        const double shrunk = (double)(full.anon_bytes + full.swap_bytes) -
                              (double)(after.anon_bytes + after.swap_bytes);
        /* Sanitizers have memory of their own that comes and goes. */
        CHECK(grown > 0.95 * (double)len && grown < 1.05 * (double)len);
        CHECK(shrunk > 0.95 * (double)len && shrunk < 1.05 * (double)len);
    }
    neap_vm_unmap(addr, len);
}

static sigjmp_buf fault_return;

static void on_fault(int signal_number) {
    siglongjmp(fault_return, signal_number);
}

static bool faults(const volatile char *addr) {
    struct sigaction action = {.sa_handler = on_fault}, old;
    sigaction(SIGSEGV, &action, &old);
    bool faulted = true;
    if (sigsetjmp(fault_return, 1) == 0) {
        (void)*addr;
        faulted = false;
    }
    sigaction(SIGSEGV, &old, NULL);
    return faulted;
}

static void test_protect(void) {
    const size_t page = neap_vm_page();
    char *addr;
    CHECK(neap_vm_reserve(4 * page, page, (void **)&addr) == 0);
    memset(addr, 5, 4 * page);
    CHECK(neap_vm_protect(addr + page, page, false) == 0);
    CHECK(faults(addr + page) && !faults(addr) && !faults(addr + 2 * page));
    CHECK(neap_vm_drop(addr + page, page) == 0); /* an inaccessible range can be dropped */
    CHECK(held(addr, 4 * page) == 3 * page);
    CHECK(neap_vm_protect(addr + page, page, true) == 0);
    CHECK(!faults(addr + page) && addr[page] == 0 && addr[2 * page] == 5);
    neap_vm_unmap(addr, 4 * page);
}

static void test_mapping(void) {
    char name[] = "/tmp/neap test-XXXXXX", path[256];
    const size_t page = neap_vm_page();
    const int fd = mkstemp(name);
    CHECK(fd >= 0 && ftruncate(fd, (off_t)(4 * page)) == 0);
    char *addr = mmap(NULL, 2 * page, PROT_READ, MAP_PRIVATE, fd, (off_t)page);
    CHECK(addr != MAP_FAILED);
    uint64_t offset = 0;
    CHECK(neap_vm_mapping(addr + page + 17, path, sizeof path, &offset) == 0);
    CHECK(strcmp(path, name) == 0 && offset == 2 * page + 17);
    CHECK(neap_vm_mapping(addr, path, strlen(name), &offset) == -ENAMETOOLONG);
    munmap(addr, 2 * page);
    CHECK(neap_vm_mapping(addr, path, sizeof path, &offset) == -ENOENT);
    close(fd);
    unlink(name);

    void *heap = malloc(1);
    CHECK(neap_vm_mapping(heap, path, sizeof path, &offset) == -ENOENT);
    CHECK(neap_vm_mapping(&offset, path, sizeof path, &offset) == -ENOENT);
    CHECK(neap_vm_mapping(NULL, path, sizeof path, &offset) == -ENOENT);
    free(heap);
}

static void test_proc(void) {
    uint64_t available = 0, total = 0;
    CHECK(neap_mem_available(&available, &total) == 0 && available <= total && available > 0);
    CHECK(neap_proc_alive(getpid()) && neap_proc_alive(1));
    CHECK(!neap_proc_alive(0) && !neap_proc_alive(-1) && !neap_proc_alive(0x7fffffff));
    neap_proc_memory memory;
    CHECK(neap_proc_memory_read(0x7fffffff, &memory) == -ENOENT);
    CHECK(neap_proc_memory_read(getpid(), &memory) == 0 && memory.anon_bytes > 0);
}

int main(void) {
    test_reserve();
    test_reserve_is_lazy();
    test_commit();
    test_drop_counts();
    test_protect();
    test_mapping();
    test_proc();
    return 0;
}
