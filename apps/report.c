/* report.c - what `neap` says: errors, tables, numbers. */
#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/utsname.h>
#include <unistd.h>

#include "bytes.h"
#include "cli.h"
#include "proc.h"

int neap_cli_error(int status, const char *remedy, const char *format, ...) {
    neap_progress_stop();
    fflush(stdout);
    fputs("neap: ", stderr);
    va_list args;
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    if (remedy) fprintf(stderr, " (%s)", remedy);
    fputc('\n', stderr);
    return status;
}

void neap_cli_warn(const char *format, ...) {
    fflush(stdout);
    fputs("neap: ", stderr);
    va_list args;
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fputc('\n', stderr);
}

void neap_cli_print_tail(const char *program, int log_fd) {
    char tail[1500];
    const off_t end = lseek(log_fd, 0, SEEK_END);
    const off_t from = end > (off_t)sizeof tail - 1 ? end - ((off_t)sizeof tail - 1) : 0;
    const ssize_t got = pread(log_fd, tail, sizeof tail - 1, from);
    if (got <= 0) return;
    tail[got] = '\0';
    const char *text = tail, *newline = strchr(tail, '\n');
    if (from && newline) text = newline + 1;
    fprintf(stderr, "--- %s said:\n%s---\n", program, text);
}

int neap_cli_finish(int status) {
    if (fflush(stdout) == 0 && !ferror(stdout)) return status;
    return neap_cli_error(NEAP_EXIT_FAILED, "is the disk full?", "standard output: %s",
                          neap_strerror(errno ? -errno : -EIO));
}

int neap_cli_print_json(json_t *document) {
    if (!document)
        return neap_cli_error(NEAP_EXIT_FAILED, NULL, "output: %s", neap_strerror(-ENOMEM));
    if (json_dumpf(document, stdout, JSON_INDENT(2) | JSON_REAL_PRECISION(9)) == 0) putchar('\n');
    json_decref(document);
    return neap_cli_finish(NEAP_EXIT_OK);
}

const char *neap_cli_size(uint64_t bytes) {
    static char buffers[4][32];
    static unsigned next;
    char *buffer = buffers[next++ % 4];
    return neap_size_format(bytes, buffer, sizeof buffers[0]);
}

static int compare_doubles(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

neap_summary neap_summarise(const double *values, size_t n) {
    neap_summary summary = {.n = n};
    double *sorted = n ? malloc(n * sizeof *sorted) : NULL;
    if (!sorted) return summary;
    memcpy(sorted, values, n * sizeof *sorted);
    qsort(sorted, n, sizeof *sorted, compare_doubles);
    summary.min = sorted[0];
    summary.max = sorted[n - 1];
    summary.median = n % 2 ? sorted[n / 2] : (sorted[n / 2 - 1] + sorted[n / 2]) / 2;
    free(sorted);
    return summary;
}

json_t *neap_summary_json(const neap_summary *summary) {
    if (summary->n == 0) return json_null();
    return json_pack("{s:f, s:f, s:f}", "min", summary->min, "median", summary->median, "max",
                     summary->max);
}

/* First "key : value" of /proc/cpuinfo; "" when there is none. */
static void cpuinfo(const char *key, char *value, size_t cap) {
    value[0] = '\0';
    FILE *file = fopen("/proc/cpuinfo", "re");
    if (!file) return;
    char line[8192];
    while (value[0] == '\0' && fgets(line, sizeof line, file)) {
        char *colon = strchr(line, ':');
        if (!colon || strncmp(line, key, strlen(key)) != 0) continue;
        colon += strspn(colon + 1, " \t") + 1;
        colon[strcspn(colon, "\n")] = '\0';
        snprintf(value, cap, "%s", colon);
    }
    fclose(file);
}

json_t *neap_machine_json(void) {
    char model[256], flags[8192];
    cpuinfo("model name", model, sizeof model);
    cpuinfo("flags", flags, sizeof flags);
    uint64_t available = 0, total = 0;
    neap_mem_available(&available, &total);
    struct utsname name;
    if (uname(&name) != 0) memset(&name, 0, sizeof name);
    return json_pack("{s:s, s:s, s:i, s:b, s:b, s:I, s:I, s:s}", "cpu", model[0] ? model : "?",
                     "arch", name.machine, "cores", (int)sysconf(_SC_NPROCESSORS_ONLN), "avx2",
                     strstr(flags, " avx2") != NULL, "avx512", strstr(flags, " avx512f") != NULL,
                     "memory_bytes", (json_int_t)total, "available_bytes", (json_int_t)available,
                     "kernel", name.release);
}
