/* Whether the machine runs on a battery, from folders like those of the kernel. */
#include "power.h"
#include "temp.h"

static void put(const char *root, const char *supply, const char *name, const char *text) {
    char command[700], path[700];
    snprintf(command, sizeof command, "mkdir -p '%s/sys/class/power_supply/%s'", root, supply);
    CHECK(system(command) == 0);
    snprintf(path, sizeof path, "%s/sys/class/power_supply/%s/%s", root, supply, name);
    FILE *file = fopen(path, "w");
    CHECK(file && fputs(text, file) >= 0 && fclose(file) == 0);
}

int main(void) {
    char *root = temp_dir();
    CHECK(!neap_on_battery(root)); /* no such folder: a desktop, a virtual machine */
    put(root, "hidpp_battery_0", "type", "Battery\n");
    put(root, "hidpp_battery_0", "scope", "Device\n");
    put(root, "hidpp_battery_0", "status", "Discharging\n");
    CHECK(!neap_on_battery(root)); /* that of a mouse */
    put(root, "BAT0", "type", "Battery\n");
    CHECK(!neap_on_battery(root)); /* no word of its state */
    put(root, "BAT0", "status", "Discharging\n");
    CHECK(neap_on_battery(root));
    put(root, "AC", "type", "Mains\n");
    CHECK(neap_on_battery(root));
    put(root, "AC", "online", "0\n");
    CHECK(neap_on_battery(root));
    put(root, "AC", "online", "1\n");
    CHECK(!neap_on_battery(root)); /* fed, but it takes more than it gets */
    put(root, "AC", "online", "0\n");
    put(root, "ucsi-source-psy-1", "type", "USB\n");
    put(root, "ucsi-source-psy-1", "online", "1\n");
    CHECK(!neap_on_battery(root));
    put(root, "ucsi-source-psy-1", "online", "0\n");
    put(root, "BAT0", "status", "Full\n");
    CHECK(!neap_on_battery(root));
    put(root, "BAT1", "type", "Battery\n");
    put(root, "BAT1", "scope", "System\n");
    put(root, "BAT1", "status", "Discharging\n");
    CHECK(neap_on_battery(root)); /* one of two */
    temp_remove(root);
    return 0;
}
