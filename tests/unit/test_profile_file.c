/* test_profile_file.c - profiles on disk: what was saved comes back; damaged files, those of other
 * devices and versions are refused; a write that fails leaves the old file. */
#include <dirent.h>
#include <errno.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fault.h"
#include "profile_file.h"
#include "temp.h"
#include "textfile.h"

static const neap_device here = {"/dev/a \"b\"", "ext4", "8:1", "6.1 x", "cpu"};

static neap_profile make_profile(void) {
    neap_profile profile = {.is_direct = true,
                            .populate_small_bps = 1,
                            .populate_huge_bps = NEAP_BPS_MAX,
                            .restored_read_bps = 123456789};
    for (size_t s = 0; s < NEAP_PROFILE_SIZES; s++)
        for (size_t d = 0; d < NEAP_PROFILE_DEPTHS; d++)
            profile.read_bps[s][d] = (s * 10 + d) * 1000; /* the first one not measured */
    neap_profile_codec *codec = neap_profile_codec_add(&profile, "q8");
    codec->decode_bps[0] = 5;
    codec->decode_bps[NEAP_PROFILE_THREADS - 1] = 6;
    codec->restored_bps = 7;
    neap_profile_codec_add(&profile, "none");
    const neap_profile_model model = {.digest = UINT64_MAX,
                                      .name = "m.gguf",
                                      .n_layers = 30,
                                      .n_threads = 2,
                                      .kv_chunk_bytes = 196608,
                                      .prefill_ns = 10,
                                      .decode_ns = 20};
    neap_profile_model_put(&profile, &model);
    CHECK(neap_profile_attention_put(&profile, "f16 \"x\"", (neap_attention_times){1, 2}) == 0);
    CHECK(neap_profile_attention_put(&profile, "q8_0", (neap_attention_times){0, 4}) == 0);
    return profile;
}

static bool is_equal(const neap_profile *a, const neap_profile *b) {
    if (a->n_codecs != b->n_codecs || a->n_models != b->n_models ||
        a->n_attentions != b->n_attentions)
        return false;
    for (size_t i = 0; i < a->n_attentions; i++) {
        const neap_profile_attention *x = &a->attentions[i], *y = &b->attentions[i];
        if (strcmp(x->kind, y->kind) != 0 || x->times.host_ns != y->times.host_ns ||
            x->times.our_ns != y->times.our_ns)
            return false;
    }
    for (size_t i = 0; i < a->n_codecs; i++)
        if (strcmp(a->codecs[i].name, b->codecs[i].name) != 0 ||
            memcmp(a->codecs[i].decode_bps, b->codecs[i].decode_bps,
                   sizeof a->codecs[i].decode_bps) != 0 ||
            a->codecs[i].restored_bps != b->codecs[i].restored_bps)
            return false;
    for (size_t i = 0; i < a->n_models; i++) {
        const neap_profile_model *x = &a->models[i], *y = &b->models[i];
        if (x->digest != y->digest || strcmp(x->name, y->name) != 0 || x->n_layers != y->n_layers ||
            x->n_threads != y->n_threads || x->kv_chunk_bytes != y->kv_chunk_bytes ||
            x->prefill_ns != y->prefill_ns || x->decode_ns != y->decode_ns)
            return false;
    }
    return a->is_direct == b->is_direct && a->populate_small_bps == b->populate_small_bps &&
           a->populate_huge_bps == b->populate_huge_bps &&
           a->restored_read_bps == b->restored_read_bps &&
           memcmp(a->read_bps, b->read_bps, sizeof a->read_bps) == 0;
}

static int load_text(const char *path, const char *text, size_t len, neap_profile *ret_profile) {
    /* In place and never cut to nothing: renaming and emptying flush, which takes long. */
    FILE *out = fopen(path, "r+b");
    CHECK(out && fwrite(text, 1, len, out) == len && fflush(out) == 0);
    CHECK(ftruncate(fileno(out), (off_t)len) == 0 && fclose(out) == 0);
    return neap_profile_load(path, &here, ret_profile);
}

static size_t n_entries(const char *folder) {
    DIR *dir = opendir(folder);
    CHECK(dir);
    size_t n = 0;
    for (const struct dirent *entry = readdir(dir); entry; entry = readdir(dir))
        n += entry->d_name[0] != '.';
    closedir(dir);
    return n;
}

static void test_round_trip(const char *path) {
    const neap_profile saved = make_profile();
    neap_profile loaded;
    CHECK(neap_profile_load(path, &here, &loaded) == -ENOENT);
    CHECK(neap_profile_save(path, &here, &saved) == 0);
    CHECK(neap_profile_load(path, &here, &loaded) == 0 && is_equal(&saved, &loaded));
    struct stat st;
    CHECK(stat(path, &st) == 0 && (st.st_mode & 0777) == 0600);
    neap_profile empty = {0};
    CHECK(neap_profile_save(path, &here, &empty) == 0);
    CHECK(neap_profile_load(path, &here, &loaded) == 0 && is_equal(&empty, &loaded));
}

static void test_foreign(const char *path) {
    const neap_profile saved = make_profile();
    neap_profile loaded;
    CHECK(neap_profile_save(path, &here, &saved) == 0);
    for (int i = 0; i < 5; i++) {
        neap_device other = here;
        char *fields[] = {other.source, other.fstype, other.number, other.kernel, other.cpu};
        fields[i][0] = '!';
        CHECK(neap_profile_load(path, &other, &loaded) == NEAP_E_CHANGED);
    }
    const char newer[] = "{\"neap_profile\": 2}";
    CHECK(load_text(path, newer, strlen(newer), &loaded) == NEAP_E_VERSION);
    /* What a newer neap wrote is not replaced by what restores showed. */
    CHECK(neap_profile_save_restored(path, &here, "q8", 1, 2) == NEAP_E_VERSION);
    CHECK(neap_profile_load(path, &here, &loaded) == NEAP_E_VERSION);
}

static void check_range(const neap_profile *profile) {
    CHECK(neap_profile_best_read(profile) <= NEAP_BPS_MAX);
    CHECK(profile->populate_small_bps <= NEAP_BPS_MAX && profile->n_codecs <= NEAP_PROFILE_CODECS);
    CHECK(profile->n_models <= NEAP_PROFILE_MODELS);
    for (size_t i = 0; i < profile->n_codecs; i++)
        for (size_t t = 0; t < NEAP_PROFILE_THREADS; t++)
            CHECK(profile->codecs[i].decode_bps[t] <= NEAP_BPS_MAX);
}

/* Cut anywhere, and with any byte changed: refused, or with rates that can be. */
static void test_damaged(const char *path) {
    const neap_profile saved = make_profile();
    neap_profile loaded;
    char *text;
    size_t len, n_refused = 0;
    CHECK(neap_profile_save(path, &here, &saved) == 0);
    CHECK(neap_textfile_read(path, 1 << 20, &text, &len) == 0 && strlen(text) == len);
    for (size_t cut = 0; cut < len; cut++)
        CHECK(load_text(path, text, cut, &loaded) == NEAP_E_CORRUPT);
    for (size_t at = 0; at < len; at++) {
        static const char bytes[] = {'9', '-', '}', '"', '\0', (char)0x80};
        for (size_t i = 0; i < sizeof bytes; i++) {
            const char before = text[at];
            text[at] = bytes[i];
            if (load_text(path, text, len, &loaded) == 0)
                check_range(&loaded);
            else
                n_refused++;
            text[at] = before;
        }
    }
    CHECK(n_refused > len);
    CHECK(load_text(path, text, len, &loaded) == 0 && is_equal(&saved, &loaded));
    free(text);
    static const char *const wrong[] = {"",
                                        "null",
                                        "[]",
                                        "3",
                                        "{}",
                                        "{\"neap_profile\":\"1\"}",
                                        "{\"neap_profile\":1}",
                                        "{\"neap_profile\":1,\"device\":[]}"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        CHECK(load_text(path, wrong[i], strlen(wrong[i]), &loaded) == NEAP_E_CORRUPT);
    char *big = malloc(1 << 20);
    CHECK(big);
    memset(big, ' ', 1 << 20);
    CHECK(load_text(path, big, 1 << 20, &loaded) == NEAP_E_CORRUPT);
    free(big);
}

static void test_restored(const char *path) {
    neap_profile saved = make_profile(), loaded;
    CHECK(neap_profile_save(path, &here, &saved) == 0);
    CHECK(neap_profile_save_restored(path, &here, "q8", 11, 0) == 0);
    saved.restored_read_bps = 11;
    CHECK(neap_profile_load(path, &here, &loaded) == 0 && is_equal(&saved, &loaded));
    CHECK(neap_profile_save_restored(path, &here, "new", 0, 12) == 0);
    neap_profile_codec_add(&saved, "new")->restored_bps = 12;
    CHECK(neap_profile_load(path, &here, &loaded) == 0 && is_equal(&saved, &loaded));
    /* Damaged, foreign, missing: made anew. */
    const neap_device other = {"x", "y", "z", "k", "c"};
    for (int i = 0; i < 3; i++) {
        if (i == 0) CHECK(neap_textfile_replace(path, "{", 1) == 0);
        if (i == 1) CHECK(neap_profile_save(path, &other, &saved) == 0);
        if (i == 2) CHECK(remove(path) == 0);
        CHECK(neap_profile_save_restored(path, &here, "q8", 13, 14) == 0);
        CHECK(neap_profile_load(path, &here, &loaded) == 0);
        CHECK(loaded.restored_read_bps == 13 && loaded.codecs[0].restored_bps == 14);
        CHECK(loaded.n_models == 0 && neap_profile_best_read(&loaded) == 0);
    }
}

/* Attention times go into a file that is there, and make none. */
static void test_attention(const char *path) {
    neap_profile saved = make_profile(), loaded;
    const neap_attention_times times = {7, 8};
    CHECK(neap_profile_save(path, &here, &saved) == 0);
    CHECK(neap_profile_save_attention(path, &here, "q8_0", times) == 0);
    saved.attentions[1].times = times;
    CHECK(neap_profile_load(path, &here, &loaded) == 0 && is_equal(&saved, &loaded));
    CHECK(neap_profile_save_attention(path, &here, "", times) == -EINVAL);
    CHECK(neap_profile_load(path, &here, &loaded) == 0 && is_equal(&saved, &loaded));
    CHECK(remove(path) == 0);
    CHECK(neap_profile_save_attention(path, &here, "q8_0", times) == -ENOENT);
    CHECK(neap_profile_load(path, &here, &loaded) == -ENOENT);
}

static void test_failing(const char *path, const char *folder) {
    const neap_profile saved = make_profile(), empty = {0};
    neap_profile loaded;
    CHECK(neap_profile_save(path, &here, &saved) == 0);
    uint32_t n = 1;
    for (int err = -1; err; n++) {
        neap_fault_arm("", n, -ENOSPC, 0);
        err = neap_profile_save(path, &here, &empty);
        neap_fault_disarm();
        CHECK(err == 0 || err == -ENOSPC);
        CHECK(neap_profile_load(path, &here, &loaded) == 0);
        CHECK(is_equal(err ? &saved : &empty, &loaded) && n_entries(folder) == 1);
    }
    CHECK(n > 3);
    neap_fault_arm("text.read", 1, -EIO, 0);
    CHECK(neap_profile_load(path, &here, &loaded) == -EIO);
    /* A file that cannot be read is not taken for one that is missing. */
    neap_fault_arm("text.read", 1, -EIO, 0);
    CHECK(neap_profile_save_restored(path, &here, "q8", 1, 2) == -EIO);
    neap_fault_disarm();
}

static void test_places(const char *folder) {
    char path[4096], again[4096];
    neap_device device, other;
    CHECK(setenv("XDG_CACHE_HOME", folder, 1) == 0);
    CHECK(neap_swap_folder(NULL, path, sizeof path) == 0);
    CHECK(strncmp(path, folder, strlen(folder)) == 0 &&
          strcmp(path + strlen(folder), "/neap/swap") == 0);
    CHECK(neap_swap_folder("", again, sizeof again) == 0 && strcmp(path, again) == 0);
    CHECK(neap_swap_folder("/x", again, sizeof again) == 0 && strcmp("/x", again) == 0);
    CHECK(neap_swap_folder("/x", again, 2) == -ENAMETOOLONG);
    /* A folder that is not there yet lies where the ones above it lie. */
    CHECK(neap_profile_locate(path, &device, path, sizeof path) == 0);
    CHECK(strncmp(path, folder, strlen(folder)) == 0 && strstr(path, "/neap/profile/"));
    CHECK(neap_profile_locate(folder, &other, again, sizeof again) == 0);
    CHECK(strcmp(path, again) == 0 && strcmp(device.source, other.source) == 0);
    CHECK(neap_profile_locate("/proc", &other, again, sizeof again) == 0);
    CHECK(strcmp(path, again) != 0 && strcmp(other.fstype, "proc") == 0);
    neap_fault_arm("device.", 1, -EACCES, 0);
    CHECK(neap_profile_locate("/proc", &other, again, sizeof again) == -EACCES);
    neap_fault_disarm();
}

int main(void) {
    char *dir = temp_dir(), folder[600], path[640];
    snprintf(folder, sizeof folder, "%s/a/b", dir);
    snprintf(path, sizeof path, "%s/profile.json", folder);
    test_round_trip(path);
    test_foreign(path);
    test_damaged(path);
    test_restored(path);
    test_attention(path);
    test_failing(path, folder);
    test_places(dir);
    temp_remove(dir);
    return 0;
}
