/* The count of what may be written behind today: shared, kept, begun anew each day, and no file can
 * make it more than was allowed. */
#include <errno.h>
#include <unistd.h>

#include "neap.h"
#include "temp.h"
#include "write_budget.h"

static void write_file(const char *dir, const char *text) {
    char path[600];
    snprintf(path, sizeof path, "%s/write-behind", dir);
    FILE *file = fopen(path, "w");
    CHECK(file && fputs(text, file) >= 0 && fclose(file) == 0);
}

static void check_file(const char *dir, const char *expected) {
    char path[600], text[80] = "";
    snprintf(path, sizeof path, "%s/write-behind", dir);
    FILE *file = fopen(path, "r");
    CHECK(file && fgets(text, sizeof text, file) && fclose(file) == 0);
    CHECK(strcmp(text, expected) == 0);
}

static void test_parse(void) {
    uint64_t bytes = 7;
    bool on_battery = true;
    CHECK(neap_write_behind_parse("off", &bytes, &on_battery) == 0 && bytes == 0 && !on_battery);
    CHECK(neap_write_behind_parse("on", &bytes, &on_battery) == 0 && !on_battery);
    CHECK(bytes == NEAP_WRITE_BEHIND_BYTES);
    CHECK(neap_write_behind_parse("always", &bytes, &on_battery) == 0 && on_battery);
    CHECK(bytes == NEAP_WRITE_BEHIND_BYTES);
    CHECK(neap_write_behind_parse("2G", &bytes, &on_battery) == 0 && !on_battery);
    CHECK(bytes == (uint64_t)2 << 30);
    CHECK(neap_write_behind_parse("maybe", &bytes, &on_battery) == NEAP_E_SYNTAX);
    CHECK(neap_write_behind_parse("", &bytes, &on_battery) == NEAP_E_SYNTAX);
    CHECK(neap_write_behind_parse("-1G", &bytes, &on_battery) == -ERANGE);
    CHECK(neap_write_behind_parse("50%", &bytes, &on_battery) == NEAP_E_SYNTAX);
    CHECK(bytes == (uint64_t)2 << 30);
}

static void test_days(void) {
    char *dir = temp_dir();
    neap_write_budget a, b;
    CHECK(neap_write_budget_open(dir, 1000, 500, &a) == 0 && a.spent_bytes == 0);
    CHECK(neap_write_budget_take(&a, 500, 300) == 300);
    check_file(dir, "500 300\n");
    CHECK(neap_write_budget_open(dir, 1000, 500, &b) == 0 && b.spent_bytes == 300);
    CHECK(neap_write_budget_take(&b, 500, 600) == 600);
    CHECK(neap_write_budget_take(&a, 500, 600) == 100); /* all that the other left */
    CHECK(neap_write_budget_take(&a, 500, 1) == 0 && neap_write_budget_take(&b, 500, 1) == 0);
    neap_write_budget_give(&a, 500, 150);
    check_file(dir, "500 850\n");
    neap_write_budget_close(&a); /* a restart */
    CHECK(neap_write_budget_open(dir, 1000, 500, &a) == 0 && a.spent_bytes == 850);
    CHECK(neap_write_budget_take(&b, 501, 400) == 400); /* a new day */
    check_file(dir, "501 400\n");
    neap_write_budget_give(&b, 500, 100); /* yesterday's is not given back to today */
    check_file(dir, "501 400\n");
    CHECK(neap_write_budget_take(&a, 501, 1000) == 600);
    neap_write_budget_close(&a);
    neap_write_budget_close(&b);
    CHECK(neap_write_budget_open(dir, 700, 501, &a) == 0); /* less is allowed than was written */
    CHECK(neap_write_budget_take(&a, 501, 1) == 0);
    neap_write_budget_close(&a);
    neap_write_budget_close(&(neap_write_budget){0});
    temp_remove(dir);
}

static int n_told;

static void count_line(int level, const char *line, void *ctx) {
    (void)ctx;
    n_told += level <= 1 && strstr(line, "write-behind");
}

static void test_bad_files(void) {
    static const char *const damaged[] = {"",
                                          "\n",
                                          "500\n",
                                          "500 x\n",
                                          "500 1 2\n",
                                          "-5 10\n",
                                          "500 10\nmore",
                                          "a b\n",
                                          "500 99999999999999999999999999\n"};
    neap_set_log(count_line, NULL);
    char *dir = temp_dir();
    neap_write_budget budget;
    for (size_t i = 0; i < sizeof damaged / sizeof damaged[0]; i++) {
        write_file(dir, damaged[i]);
        n_told = 0;
        CHECK(neap_write_budget_open(dir, 1000, 500, &budget) == 0 && budget.spent_bytes == 0);
        CHECK(n_told == 1);
        CHECK(neap_write_budget_take(&budget, 500, 100) == 100 && n_told == 1);
        check_file(dir, "500 100\n"); /* it is whole again */
        write_file(dir, damaged[i]);
        CHECK(neap_write_budget_take(&budget, 500, 950) == 900); /* what it knew still counts */
        neap_write_budget_close(&budget);
    }
    /* A folder that is none. */
    char path[600];
    snprintf(path, sizeof path, "%s/write-behind/swap", dir);
    n_told = 0;
    CHECK(neap_write_budget_open(path, 1000, 500, &budget) == 0);
    CHECK(neap_write_budget_take(&budget, 500, 700) == 700);
    CHECK(neap_write_budget_take(&budget, 500, 700) == 300 && n_told == 1);
    neap_write_budget_close(&budget);
    temp_remove(dir);
    neap_set_log(NULL, NULL);
}

int main(void) {
    test_parse();
    test_days();
    test_bad_files();
    return 0;
}
