/* instances.c - running instances, found by their control sockets.
 * The socket of a dead process is removed on sight. One of a live process on which nobody listens
 * is only passed over: its instance may be starting, or the pid may be another program's by now. */
#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli.h"
#include "ctl.h"
#include "proc.h"
#include "sock.h"

#define STAT_TIMEOUT_MS 10000u

static int socket_path(int pid, char path[NEAP_PATH_MAX]) {
    char folder[NEAP_PATH_MAX - 64];
    const int err = neap_runtime_dir(folder, sizeof folder);
    if (err) return err;
    snprintf(path, NEAP_PATH_MAX, "%s/%d.sock", folder, pid);
    return 0;
}

static int call(int pid, const neap_ctl_request *request, uint64_t timeout_ms, char **ret_reply) {
    char path[NEAP_PATH_MAX], *line = NULL;
    int err = socket_path(pid, path);
    if (!err) err = neap_ctl_request_format(request, &line);
    if (!err) err = neap_sock_call(path, line, timeout_ms, ret_reply);
    free(line);
    return err;
}

int neap_instance_stat(int pid, json_t **ret_stat) {
    char *reply = NULL;
    int err = call(pid, &(neap_ctl_request){.command = NEAP_CTL_STAT}, STAT_TIMEOUT_MS, &reply);
    if (err) return err;
    json_t *object = json_loads(reply, JSON_REJECT_DUPLICATES, NULL);
    free(reply);
    json_t *stat = json_object_get(object, "instance");
    if (json_is_object(stat))
        *ret_stat = json_incref(stat);
    else
        err = NEAP_E_SYNTAX;
    json_decref(object);
    return err;
}

int neap_instance_evict(int pid, const neap_evict_request *request, neap_evict_result *ret_result,
                        char **ret_message) {
    char *reply = NULL;
    int err =
        call(pid, &(neap_ctl_request){.command = NEAP_CTL_EVICT, .evict = *request}, 0, &reply);
    if (!err) err = neap_ctl_evict_parse(reply, ret_result, ret_message);
    free(reply);
    return err;
}

int neap_instance_restore(int pid, uint64_t *ret_bytes, uint64_t *ret_ns, char **ret_message) {
    char *reply = NULL;
    int err = call(pid, &(neap_ctl_request){.command = NEAP_CTL_RESTORE}, 0, &reply);
    if (!err) err = neap_ctl_restore_parse(reply, ret_bytes, ret_ns, ret_message);
    free(reply);
    return err;
}

uint64_t neap_instance_count(const json_t *stat, const char *group, const char *key) {
    const json_t *object = group ? json_object_get(stat, group) : stat;
    const json_int_t value = json_integer_value(json_object_get(object, key));
    return value > 0 ? (uint64_t)value : 0;
}

const char *neap_instance_text(const json_t *stat, const char *key) {
    const char *value = json_string_value(json_object_get(stat, key));
    return value ? value : "?";
}

uint64_t neap_instance_held(const json_t *stat) {
    return neap_instance_count(stat, "bytes", "weights_resident") +
           neap_instance_count(stat, "bytes", "kv_resident") +
           neap_instance_count(stat, "bytes", "kv_compressed_memory");
}

bool neap_instance_idle(const json_t *stat) {
    return strcmp(neap_instance_text(stat, "state"), "idle") == 0;
}

static int compare_for_eviction(const void *a, const void *b) {
    const json_t *x = ((const neap_instance *)a)->stat, *y = ((const neap_instance *)b)->stat;
    if (neap_instance_idle(x) != neap_instance_idle(y)) return neap_instance_idle(x) ? -1 : 1;
    const uint64_t x_held = neap_instance_held(x), y_held = neap_instance_held(y);
    return (x_held < y_held) - (x_held > y_held);
}

void neap_instances_sort(neap_instances *instances) {
    if (instances->n > 1)
        qsort(instances->items, instances->n, sizeof *instances->items, compare_for_eviction);
}

/* The pid of "123.sock"; 0 when the name is another. */
static int pid_of_name(const char *name) {
    char *end;
    const long pid = strtol(name, &end, 10);
    return strcmp(end, ".sock") == 0 && pid > 0 && pid <= INT32_MAX ? (int)pid : 0;
}

static int compare_pids(const void *a, const void *b) {
    const neap_instance *x = a, *y = b;
    return (x->pid > y->pid) - (x->pid < y->pid);
}

static int add(neap_instances *list, int pid, json_t *stat) {
    neap_instance *items = realloc(list->items, (list->n + 1) * sizeof *items);
    if (!items) {
        json_decref(stat);
        return -ENOMEM;
    }
    list->items = items;
    list->items[list->n++] = (neap_instance){.pid = pid, .stat = stat};
    return 0;
}

int neap_instances_load(neap_instances *ret_instances) {
    char folder[NEAP_PATH_MAX], path[NEAP_PATH_MAX];
    int err = neap_runtime_dir(folder, sizeof folder);
    if (err) return err;
    DIR *dir = opendir(folder);
    if (!dir) return -errno;

    neap_instances list = {0};
    const struct dirent *entry;
    while (!err && (entry = readdir(dir))) {
        const int pid = pid_of_name(entry->d_name);
        if (pid == 0 || socket_path(pid, path) != 0) continue;
        json_t *stat = NULL;
        if (!neap_proc_alive(pid)) {
            unlink(path);
            continue;
        }
        const int failed = neap_instance_stat(pid, &stat);
        if (!failed)
            err = add(&list, pid, stat);
        else if (failed != -ENOENT && failed != -ECONNREFUSED) {
            list.n_silent++;
            neap_cli_warn("pid %d: does not answer: %s", pid, neap_strerror(failed));
        }
    }
    closedir(dir);
    if (err) {
        neap_instances_free(&list);
        return err;
    }
    if (list.n) qsort(list.items, list.n, sizeof *list.items, compare_pids);
    *ret_instances = list;
    return 0;
}

void neap_instances_free(neap_instances *instances) {
    for (size_t i = 0; i < instances->n; i++)
        json_decref(instances->items[i].stat);
    free(instances->items);
    *instances = (neap_instances){0};
}

void neap_instances_print(const neap_instances *instances, FILE *out) {
    fprintf(out, "%7s  %-16s %-28s %8s %10s %10s %10s  %s\n", "PID", "NAME", "MODEL", "CONTEXTS",
            "RESIDENT", "COMPRESSED", "ON-DISK", "STATE");
    for (size_t i = 0; i < instances->n; i++) {
        const json_t *stat = instances->items[i].stat;
        const uint64_t resident = neap_instance_count(stat, "bytes", "weights_resident") +
                                  neap_instance_count(stat, "bytes", "kv_resident") +
                                  neap_instance_count(stat, "bytes", "scratch_resident");
        fprintf(out, "%7d  %-16s %-28s %8llu %10s %10s %10s  %s\n", instances->items[i].pid,
                neap_instance_text(stat, "program"), neap_instance_text(stat, "model"),
                (unsigned long long)neap_instance_count(stat, NULL, "n_contexts"),
                neap_cli_size(resident),
                neap_cli_size(neap_instance_count(stat, "bytes", "kv_compressed_memory")),
                neap_cli_size(neap_instance_count(stat, "bytes", "kv_storage")),
                neap_instance_text(stat, "state"));
    }
}

static int pick_one(int pid, neap_instances *ret_instances) {
    json_t *stat = NULL;
    int err = neap_instance_stat(pid, &stat);
    if (err == -ENOENT || err == -ECONNREFUSED)
        return neap_cli_error(NEAP_EXIT_FAILED, "see neap ps", "pid %d: no running instance", pid);
    neap_instances list = {0};
    if (!err) err = add(&list, pid, stat);
    if (err) return neap_cli_error(NEAP_EXIT_FAILED, NULL, "pid %d: %s", pid, neap_strerror(err));
    *ret_instances = list;
    return 0;
}

int neap_instances_pick(int pid, neap_instances *ret_instances) {
    if (pid) return pick_one(pid, ret_instances);
    neap_instances list = {0};
    const int err = neap_instances_load(&list);
    if (err)
        return neap_cli_error(NEAP_EXIT_FAILED, NULL, "control sockets: %s", neap_strerror(err));
    if (list.n == 1 && list.n_silent == 0) {
        *ret_instances = list;
        return 0;
    }
    if (list.n == 0 && list.n_silent > 0)
        return neap_cli_error(NEAP_EXIT_FAILED, "is it stopped, or very busy?",
                              "no running instance answers");
    if (list.n == 0)
        return neap_cli_error(NEAP_EXIT_FAILED, "start one with neap serve or neap run",
                              "no instance is running");
    const int status = neap_cli_error(NEAP_EXIT_USAGE, "name one with --pid P",
                                      "%zu instances are running", list.n + list.n_silent);
    neap_instances_print(&list, stderr);
    neap_instances_free(&list);
    return status;
}
