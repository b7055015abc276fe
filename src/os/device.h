/* device.h - what measurements of a folder's storage and of this processor hold for.
 * Errors    0 or -errno. */
#ifndef NEAP_OS_DEVICE_H
#define NEAP_OS_DEVICE_H

/* Printable ASCII. */
typedef struct neap_device {
    char source[256]; /* of the mount: "/dev/nvme0n1p2"; "?": unknown, as the others */
    char fstype[64];
    char number[32]; /* "259:2" */
    char kernel[96]; /* release and machine */
    char cpu[128];
} neap_device;

/* Of the folder, or where it is missing of the next one above that is there. */
int neap_device_identify(const char *folder, neap_device *ret_device);
#endif
