/* test_engine_profile.c - the engine and its device profile: rates come from the file, restores
 * correct them and write them back, evictions place by them; a file that is damaged, foreign or
 * cannot be written harms nothing. Rates in files are far beyond any machine's, so that no
 * measured throughput can be near them. */
#include <errno.h>

#include "fault.h"
#include "profile_file.h"
#include "rig.h"
#include "temp.h"

enum { MAX_ROUNDS = 2000 };

static int n_warnings;

static void count_warnings(int level, const char *line, void *ctx) {
    (void)ctx;
    if (level <= 1 && strstr(line, "device profile")) n_warnings++;
}

static neap_stat stat_of(const rig *r) {
    neap_stat stat;
    neap_stat_get(r->engine, &stat);
    return stat;
}

static void weights_round(const rig *r) {
    const neap_evict_request all = {.bytes = UINT64_MAX, .only = NEAP_ONLY_WEIGHTS};
    neap_evict_result result;
    uint64_t bytes;
    CHECK(neap_evict(r->engine, &all, &result) == 0);
    CHECK(neap_restore(r->engine, &bytes) == 0);
}

static void restore_until(const rig *r, neap_rate_source source) {
    for (int i = 0; i < MAX_ROUNDS && stat_of(r).rate_source != source; i++)
        weights_round(r);
    CHECK(stat_of(r).rate_source == source);
}

static neap_device device_here(void) {
    neap_device device;
    CHECK(neap_device_identify("/tmp", &device) == 0);
    return device;
}

static neap_profile loaded(const char *path) {
    const neap_device device = device_here();
    neap_profile profile;
    CHECK(neap_profile_load(path, &device, &profile) == 0);
    return profile;
}

static void file_rates(const char *path, uint64_t read_bps, uint64_t decode_bps) {
    const neap_device device = device_here();
    remove(path);
    CHECK(neap_profile_save_restored(path, &device, "q8", read_bps, decode_bps) == 0);
}

static void write_text(const char *path, const char *text) {
    FILE *out = fopen(path, "wb");
    CHECK(out && fputs(text, out) >= 0 && fclose(out) == 0);
}

static void test_without(void) {
    rig r;
    rig_make(&r, (neap_options){0}, false);
    const neap_stat stat = stat_of(&r);
    CHECK(stat.rate_source == NEAP_RATES_DEFAULT && stat.read_bps == NEAP_DEFAULT_READ_BPS &&
          stat.decode_bps == NEAP_DEFAULT_DECODE_BPS);
    restore_until(&r, NEAP_RATES_MEASURED);
    CHECK(stat_of(&r).decode_bps == NEAP_DEFAULT_DECODE_BPS);
    rig_check_all(&r);
    rig_free(&r);
}

/* What restores showed is in the file, and what the next engine starts with. */
static void test_written_back(const char *path) {
    rig r;
    rig_make(&r, (neap_options){.profile = path}, false);
    CHECK(stat_of(&r).rate_source == NEAP_RATES_DEFAULT);
    restore_until(&r, NEAP_RATES_MEASURED);
    rig_free(&r);
    const neap_profile profile = loaded(path);
    CHECK(profile.restored_read_bps > 0 && profile.n_codecs == 0);
    rig_make(&r, (neap_options){.profile = path}, false);
    CHECK(stat_of(&r).rate_source == NEAP_RATES_MEASURED);
    CHECK(stat_of(&r).read_bps == profile.restored_read_bps);
    rig_free(&r);
}

static void test_damaged(const char *path) {
    const char *const texts[] = {"", "{\"neap_profile\": 1, \"device\"", "\xff\xfe"};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        rig r;
        write_text(path, texts[i]);
        n_warnings = 0;
        rig_make(&r, (neap_options){.profile = path}, false);
        CHECK(n_warnings == 1 && stat_of(&r).rate_source == NEAP_RATES_DEFAULT);
        restore_until(&r, NEAP_RATES_MEASURED); /* measured again ... */
        rig_check_all(&r);
        rig_free(&r);
        CHECK(loaded(path).restored_read_bps > 0); /* ... and written */
    }
}

static void test_foreign(const char *path) {
    const neap_device other = {"a", "b", "c", "d", "e"};
    rig r;
    CHECK(neap_profile_save_restored(path, &other, "q8", 5, 6) == 0);
    n_warnings = 0;
    rig_make(&r, (neap_options){.profile = path}, false);
    CHECK(n_warnings == 1 && stat_of(&r).rate_source == NEAP_RATES_DEFAULT);
    CHECK(stat_of(&r).read_bps == NEAP_DEFAULT_READ_BPS);
    rig_free(&r);
}

/* The file cannot be written: said once, and that is all. */
static void test_unwritable(const char *path) {
    rig r;
    remove(path);
    rig_make(&r, (neap_options){.profile = path}, false);
    n_warnings = 0;
    neap_fault_arm("text.", 1, -ENOSPC, 1);
    restore_until(&r, NEAP_RATES_MEASURED);
    const neap_stat stat = stat_of(&r);
    CHECK(stat.errors == 0 && stat.last_error[0] == '\0');
    rig_check_all(&r);
    rig_free(&r);
    CHECK(neap_fault_fired() > 0 && n_warnings == 1);
    neap_fault_disarm();
    /* No place at all. */
    rig_make(&r, (neap_options){.profile = "/proc/no/such/profile.json"}, false);
    restore_until(&r, NEAP_RATES_MEASURED);
    rig_check_all(&r);
    rig_free(&r);
    /* The device cannot be told: no profile. */
    neap_fault_arm("device.", 1, -EACCES, 0);
    rig_make(&r, (neap_options){.profile = path}, false);
    CHECK(neap_fault_fired() == 1);
    neap_fault_disarm();
    rig_free(&r);
}

static neap_evict_result evict_some_kv(const rig *r) {
    const neap_evict_request request = {.bytes = 100000, .only = NEAP_ONLY_KV};
    neap_evict_result result;
    CHECK(neap_evict(r->engine, &request, &result) == 0);
    return result;
}

/* Storage is said to be a thousand times slower than decoding, so chunks go to memory. Restores of
 * weights show what it is, and chunks go to storage. */
static void test_drift_moves_placement(const char *path) {
    rig r;
    rig_random random = {7};
    uint64_t bytes;
    file_rates(path, 1, 1000);
    rig_make(&r, (neap_options){.profile = path}, false);
    CHECK(stat_of(&r).read_bps == 1 && stat_of(&r).decode_bps == 1000);
    neap_use_begin(r.engine, NEAP_USE_COMPUTE);
    for (uint32_t s = 0; s < RIG_STREAMS; s++)
        CHECK(rig_write(&r, &r.caches[0], &random, s, 0, RIG_CELLS, true) == 0);
    neap_use_end(r.engine, NEAP_USE_COMPUTE);
    const neap_evict_result before = evict_some_kv(&r);
    CHECK(before.kv_memory_bytes > 0 && before.kv_storage_bytes == 0);
    rig_note_evicted(&r);
    CHECK(neap_restore(r.engine, &bytes) == 0);

    restore_until(&r, NEAP_RATES_DRIFTED);
    CHECK(stat_of(&r).read_bps > 100000 && stat_of(&r).decode_bps == 1000);
    const neap_evict_result after = evict_some_kv(&r);
    CHECK(after.kv_storage_bytes > 0 && after.kv_memory_bytes == 0);
    rig_note_evicted(&r);
    rig_check_all(&r);
    rig_free(&r);
    const neap_profile profile = loaded(path);
    CHECK(profile.restored_read_bps > 100000); /* the file follows */
    CHECK(neap_profile_codec_find(&profile, "q8")->restored_bps == 1000);
}

/* What attention took is known at once, to the next engine only where there is a file. */
static void test_attention(const char *path) {
    const neap_attention_times kept = {3, 4};
    neap_attention_times times = {0};
    rig r;
    for (int has_file = 0; has_file < 2; has_file++) {
        remove(path);
        if (has_file) file_rates(path, 1, 1000);
        rig_make(&r, (neap_options){.profile = path}, false);
        CHECK(!neap_attention_recall(r.engine, "a kind", &times));
        neap_attention_keep(r.engine, "a kind", &kept);
        CHECK(neap_attention_recall(r.engine, "a kind", &times));
        CHECK(times.host_ns == 3 && times.our_ns == 4);
        CHECK(!neap_attention_recall(r.engine, "another", &times));
        rig_free(&r);
        rig_make(&r, (neap_options){.profile = path}, false);
        CHECK(neap_attention_recall(r.engine, "a kind", &times) == has_file);
        rig_free(&r);
    }
    rig_make(&r, (neap_options){0}, false);
    neap_attention_keep(r.engine, "a kind", &kept);
    CHECK(!neap_attention_recall(r.engine, "a kind", &times));
    rig_free(&r);
}

int main(void) {
    char *dir = temp_dir(), path[600];
    snprintf(path, sizeof path, "%s/profile.json", dir);
    neap_set_log(count_warnings, NULL);
    test_without();
    test_written_back(path);
    test_damaged(path);
    test_foreign(path);
    test_unwritable(path);
    test_drift_moves_placement(path);
    test_attention(path);
    temp_remove(dir);
    return 0;
}
