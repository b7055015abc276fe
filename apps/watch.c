/* watch.c - neap watch: the pressure service. The same signals and the same decision as inside an
 * instance, but for all of them: the largest idle one gives memory back first. While it runs,
 * instances leave what the machine lacks to it (turn.h), unless the end is near. */
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "cli.h"
#include "clock.h"
#include "sensor.h"
#include "turn.h"

#define TAKE_NS 200000000u
#define TURN_NS 500000000u
#define RETRY_NS 1000000000u

enum { OPT_JSON = NEAP_OPT_OWN, OPT_ONCE, OPT_DRY_RUN, OPT_ROOT };

typedef struct service {
    bool as_json, once, dry_run;
    const char *root;
    neap_pressure_sensor *sensor;
    neap_pressure_state state;
    int lock, turn; /* of turn.h; -1: none */
} service;

static const neap_command watch_command = {
    "watch",
    "usage: neap watch [--once] [--dry-run] [--json]\n"
    "\n"
    "The pressure service: when memory gets short (stalls, the limit of the memory group, little\n"
    "available), the running instances give theirs back, the largest idle one first. One line an\n"
    "action; ends with Ctrl-C. Instances watch by themselves, too; with the service the idle ones\n"
    "go first.\n"
    "\n"
    "  --once      looks once, acts if need be, and ends\n"
    "  --dry-run   only says what it would release\n"
    "  --json      one JSON document a line on standard output\n"
    "  --root DIR  reads /proc and the memory groups under DIR (for tests; no events then)\n"
    "  -h, --help  this text\n"
    "  --version   the version\n"};

/* ---- ending ---- */

static neap_pressure_sensor *volatile signalled_sensor;
static volatile sig_atomic_t ended;

static void end(int number) {
    (void)number;
    ended = 1;
    const int saved = errno;
    if (signalled_sensor) neap_pressure_sensor_wake(signalled_sensor);
    errno = saved;
}

static void end_on_signals(neap_pressure_sensor *sensor) {
    struct sigaction action = {.sa_handler = end};
    sigemptyset(&action.sa_mask);
    signalled_sensor = sensor;
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
}

/* ---- saying ---- */

static const char *level_name(const service *s, const neap_pressure_decision *decision) {
    return decision->severity == NEAP_PRESSURE_CRITICAL                    ? "critical"
           : s->state.pressed || decision->severity == NEAP_PRESSURE_SHORT ? "short"
                                                                           : "calm";
}

static json_t *domain_json(const neap_pressure_domain *domain) {
    if (domain->size_bytes == 0) return json_null();
    return json_pack("{s:I, s:I, s:f, s:f}", "available_bytes", (json_int_t)domain->available_bytes,
                     "size_bytes", (json_int_t)domain->size_bytes, "some_percent",
                     domain->some_permille / 10.0, "full_percent", domain->full_permille / 10.0);
}

/* Takes the list. */
static int say_json(const service *s, const neap_pressure_signals *signals,
                    const neap_pressure_decision *decision, json_t *list) {
    json_t *document =
        json_pack("{s:I, s:s, s:o, s:o, s:I, s:b, s:o}", "time", (json_int_t)time(NULL), "level",
                  level_name(s, decision), "machine", domain_json(&signals->machine), "group",
                  domain_json(&signals->group), "wanted_bytes", (json_int_t)decision->release_bytes,
                  "dry_run", s->dry_run, "instances", list);
    if (!document) return neap_cli_error(NEAP_EXIT_FAILED, NULL, "%s", neap_strerror(-ENOMEM));
    if (json_dumpf(document, stdout, JSON_COMPACT | JSON_REAL_PRECISION(9)) == 0) putchar('\n');
    json_decref(document);
    return neap_cli_finish(NEAP_EXIT_OK);
}

/* Of what is short, or else of the machine. */
static void say_available(const neap_pressure_signals *signals, bool by_machine) {
    const bool is_group = !by_machine && signals->group.size_bytes > 0;
    const neap_pressure_domain *domain = is_group ? &signals->group : &signals->machine;
    printf("%s of %s available%s\n", neap_cli_size(domain->available_bytes),
           neap_cli_size(domain->size_bytes), is_group ? " in the memory group" : "");
}

/* ---- acting ---- */

/* Asks one instance; what it gave back, or would. */
static uint64_t ask_one(const service *s, const neap_instance *instance, uint64_t bytes,
                        json_t *list, neap_evict_result *ret_result) {
    neap_evict_result result = {.asked_bytes = bytes};
    const uint64_t held = neap_instance_held(instance->stat);
    char *message = NULL;
    if (s->dry_run) {
        result.released_bytes = held < bytes ? held : bytes;
    } else {
        const neap_evict_request request = {.bytes = bytes, .by_pressure = true};
        const int err = neap_instance_evict(instance->pid, &request, &result, &message);
        if (err) {
            neap_cli_warn("pid %d: nothing released: %s", instance->pid,
                          message ? message : neap_strerror(err));
            free(message);
            return 0;
        }
    }
    json_array_append_new(list, json_pack("{s:i, s:I, s:I, s:I}", "pid", instance->pid,
                                          "asked_bytes", (json_int_t)bytes, "released_bytes",
                                          (json_int_t)result.released_bytes, "duration_ns",
                                          (json_int_t)result.duration_ns));
    *ret_result = result;
    return result.released_bytes;
}

static void say_asked(const service *s, const neap_instance *instance, uint64_t bytes,
                      const neap_evict_result *result) {
    printf("pid %d (%s): %s %s of %s wanted", instance->pid,
           neap_instance_text(instance->stat, "program"), s->dry_run ? "would release" : "released",
           neap_cli_size(result->released_bytes), neap_cli_size(bytes));
    if (!s->dry_run) printf(" in %.0f ms", (double)result->duration_ns / 1e6);
    fputs("; ", stdout);
}

/* What --once says when nothing was released. */
static int say_nothing(const service *s, const neap_pressure_signals *signals,
                       const neap_pressure_decision *decision) {
    if (s->as_json) return say_json(s, signals, decision, json_array());
    fputs(s->state.pressed ? "memory is short, but no instance can give any back: "
                           : "no pressure: ",
          stdout);
    say_available(signals, decision->by_machine || !s->state.pressed);
    return neap_cli_finish(NEAP_EXIT_OK);
}

static int release(service *s, neap_instances *instances, const neap_pressure_signals *signals,
                   const neap_pressure_decision *decision) {
    const bool is_critical = decision->severity == NEAP_PRESSURE_CRITICAL;
    uint64_t left = decision->release_bytes;
    json_t *list = json_array();
    neap_instances_sort(instances);
    for (size_t i = 0; i < instances->n && left > 0; i++) {
        const neap_instance *instance = &instances->items[i];
        neap_evict_result result = {0};
        if (neap_instance_held(instance->stat) == 0) continue;
        if (!is_critical && !neap_instance_idle(instance->stat)) continue;
        const uint64_t given = ask_one(s, instance, left, list, &result);
        if (given > 0 && !s->as_json) {
            say_asked(s, instance, left, &result);
            say_available(signals, decision->by_machine);
        }
        left -= given < left ? given : left;
    }
    neap_pressure_released(&s->state, decision->release_bytes - left);
    if (s->as_json) return say_json(s, signals, decision, list);
    json_decref(list);
    if (s->once && left == decision->release_bytes) return say_nothing(s, signals, decision);
    return neap_cli_finish(NEAP_EXIT_OK);
}

static uint64_t held_by_all(const neap_instances *instances) {
    uint64_t held = 0;
    for (size_t i = 0; i < instances->n; i++)
        held += neap_instance_held(instances->items[i].stat);
    return held;
}

/* Asks the instances what they hold only if anything is wanted at all. */
static int look(service *s, uint64_t *ret_look_ns) {
    neap_pressure_signals signals;
    const int err = neap_pressure_sensor_read(s->sensor, &signals);
    if (err && s->once)
        return neap_cli_error(NEAP_EXIT_FAILED, "is /proc mounted?", "memory: %s",
                              neap_strerror(err));
    if (err) { /* a service outlives a bad moment */
        *ret_look_ns = neap_clock_ns() + RETRY_NS;
        return NEAP_EXIT_OK;
    }
    signals.blind = true; /* a service may look: no event comes before memory is nearly out */
    signals.resident_bytes = UINT64_MAX / 2;
    neap_pressure_state before = s->state;
    neap_pressure_decision decision = neap_pressure_decide(&s->state, &signals);
    int status = NEAP_EXIT_OK;
    if (decision.release_bytes > 0) {
        neap_instances instances = {0};
        const bool ours = s->turn >= 0 && neap_turn_take(s->turn, TURN_NS);
        neap_pressure_signals fresh; /* an instance that had the turn may have released enough */
        if (ours && neap_pressure_sensor_read(s->sensor, &fresh) == 0) {
            signals.machine.available_bytes = fresh.machine.available_bytes;
            signals.group.available_bytes = fresh.group.available_bytes;
        }
        const int failed = neap_instances_load(&instances);
        if (failed) neap_cli_warn("control sockets: %s", neap_strerror(failed));
        signals.resident_bytes = held_by_all(&instances);
        s->state = before;
        decision = neap_pressure_decide(&s->state, &signals);
        if (decision.release_bytes > 0) status = release(s, &instances, &signals, &decision);
        if (ours) neap_turn_give(s->turn);
        neap_instances_free(&instances);
    }
    if (s->once && decision.release_bytes == 0) status = say_nothing(s, &signals, &decision);
    *ret_look_ns = decision.look_ns;
    return status;
}

static int serve(service *s) {
    uint64_t look_ns = 0; /* the first at once */
    int status = NEAP_EXIT_OK;
    while (!ended && status == NEAP_EXIT_OK) {
        neap_pressure_sensor_wait(s->sensor, look_ns);
        if (ended) break;
        status = look(s, &look_ns);
        if (s->once) break;
    }
    return status;
}

static int start(service *s) {
    int err = neap_pressure_sensor_open(s->root, getenv("MEMORY_PRESSURE_WATCH"),
                                        getenv("MEMORY_PRESSURE_WRITE"), &s->sensor);
    if (err == -ECANCELED)
        return neap_cli_error(NEAP_EXIT_FAILED, "unset MEMORY_PRESSURE_WATCH to watch",
                              "watch: MEMORY_PRESSURE_WATCH=/dev/null turns it off");
    if (err)
        return neap_cli_error(NEAP_EXIT_FAILED, "is /proc mounted?", "watch: %s",
                              neap_strerror(err));
    if (s->dry_run) return 0;
    err = neap_turn_open("pressure.lock", &s->turn);
    if (!err && !s->once) err = neap_turn_open("watch.lock", &s->lock);
    if (err) return neap_cli_error(NEAP_EXIT_FAILED, NULL, "watch: %s", neap_strerror(err));
    if (!s->once && !neap_turn_take(s->lock, TAKE_NS))
        return neap_cli_error(NEAP_EXIT_FAILED, "one is enough for all instances",
                              "watch: another neap watch is running");
    return 0;
}

int neap_cmd_watch(int argc, char **argv) {
    static const struct option options[] = {NEAP_OPTIONS_BASIC,
                                            {"json", no_argument, NULL, OPT_JSON},
                                            {"once", no_argument, NULL, OPT_ONCE},
                                            {"dry-run", no_argument, NULL, OPT_DRY_RUN},
                                            {"root", required_argument, NULL, OPT_ROOT},
                                            {0}};
    service s = {.root = "", .lock = -1, .turn = -1};
    int code, status;
    while ((code = getopt_long(argc, argv, ":h", options, NULL)) != -1) {
        if (neap_option_basic(&watch_command, code, argv, &status)) return status;
        if (code == OPT_JSON) s.as_json = true;
        if (code == OPT_ONCE) s.once = true;
        if (code == OPT_DRY_RUN) s.dry_run = true;
        if (code == OPT_ROOT) s.root = optarg;
    }
    if (optind < argc)
        return neap_cli_error(NEAP_EXIT_USAGE, "see neap watch --help", "%s: one argument too many",
                              argv[optind]);
    status = start(&s);
    if (!status) {
        end_on_signals(s.sensor);
        status = serve(&s);
    }
    signalled_sensor = NULL;
    neap_pressure_sensor_close(s.sensor);
    neap_turn_close(s.lock);
    neap_turn_close(s.turn);
    return status;
}
