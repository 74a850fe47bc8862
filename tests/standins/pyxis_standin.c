/*
 * Stand-in for NVIDIA's pyxis, for tests on a real Slurm: takes the same options (those of 0.24.0), refuses what pyxis
 * refuses before it starts a container, records the options of each task, and runs the task on the node itself.
 *
 * plugstack.conf:  required /path/pyxis_standin.so /folder/of/the/records
 * A record is called JOB.STEP.TASK and holds "option=value" strings, each ended by NUL.
 *
 * Written after slurm/spank.h and spank(7). Build: gcc -shared -fPIC -o pyxis_standin.so pyxis_standin.c
 */
#include <slurm/spank.h>

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

SPANK_PLUGIN(pyxis_standin, 1)

enum { MAX_OPTIONS = 32 };

struct choice {
    const char *name;
    const char *argument; /* NULL: the option is a switch */
};

static const struct choice choices[] = {
    {"container-image", "[USER@][REGISTRY#]IMAGE[:TAG]|PATH"},
    {"container-mounts", "SRC:DST[:FLAGS][,SRC:DST...]"},
    {"container-workdir", "PATH"},
    {"container-name", "NAME"},
    {"container-save", "PATH"},
    {"container-mount-home", NULL},
    {"no-container-mount-home", NULL},
    {"container-remap-root", NULL},
    {"no-container-remap-root", NULL},
    {"container-entrypoint", NULL},
    {"no-container-entrypoint", NULL},
    {"container-entrypoint-log", NULL},
    {"container-writable", NULL},
    {"container-readonly", NULL},
    {"container-env", "NAME[,NAME...]"},
    {"container-unshare", "NAMESPACE[,NAMESPACE...]"},
};

enum { CHOICES = sizeof(choices) / sizeof(choices[0]), IMAGE = 0, MOUNTS = 1, NAME = 3 };

static char *given[MAX_OPTIONS]; /* values, "" for a switch; NULL: not given */
static char *records;

static int check_mounts(const char *text)
{
    char *copy = strdup(text), *rest = copy, *mount;
    int result = 0;

    while (copy != NULL && (mount = strsep(&rest, ",")) != NULL) {
        const char *source = strsep(&mount, ":");
        if (source[0] == '/' || source[0] == '.' || !strcmp(source, "tmpfs") || !strcmp(source, "umount"))
            continue;
        slurm_error("pyxis: mount source must be a relative path, an absolute path, \"tmpfs\" or \"umount\"");
        result = -1;
        break;
    }
    free(copy);
    return result;
}

static int take(int value, const char *argument, int remote)
{
    (void)remote;
    if (value == MOUNTS && check_mounts(argument) != 0)
        return -1;
    free(given[value]);
    given[value] = strdup(argument != NULL ? argument : "");
    return given[value] != NULL ? 0 : -1;
}

int slurm_spank_init(spank_t spank, int argc, char **argv)
{
    if (argc != 1) {
        slurm_error("pyxis_standin: plugstack.conf must name the folder of the records");
        return -1;
    }
    records = strdup(argv[0]);
    for (int at = 0; at < CHOICES; at++) {
        struct spank_option option = {
            .name = (char *)choices[at].name,
            .arginfo = (char *)choices[at].argument,
            .usage = "[stand-in for pyxis]",
            .has_arg = choices[at].argument != NULL,
            .val = at,
            .cb = take,
        };
        if (spank_option_register(spank, &option) != ESPANK_SUCCESS)
            return -1;
    }
    return 0;
}

/* As pyxis does it: without an image or a name there is no container, and the task runs on the node itself. */
int slurm_spank_init_post_opt(spank_t spank, int argc, char **argv)
{
    (void)argc;
    (void)argv;
    if (spank_context() != S_CTX_LOCAL || given[IMAGE] != NULL || given[NAME] != NULL)
        return 0;
    for (int at = 0; at < CHOICES; at++) {
        if (given[at] != NULL)
            slurm_error("pyxis: ignoring --%s because neither --container-image nor --container-name is set",
                        choices[at].name);
    }
    (void)spank;
    return 0;
}

static int image_is_missing(void)
{
    const char *image = given[IMAGE];

    if (image == NULL || (image[0] != '/' && image[0] != '.') || access(image, R_OK) == 0)
        return 0;
    slurm_error("pyxis: failed to create container filesystem for image: %s", image);
    slurm_error("pyxis:     [ERROR] No such file or directory: %s", image);
    return 1;
}

int slurm_spank_task_init(spank_t spank, int argc, char **argv)
{
    uint32_t job = 0, step = 0, task = 0;
    char path[4096];
    FILE *file;

    (void)argc;
    (void)argv;
    if (given[IMAGE] == NULL && given[NAME] == NULL)
        return 0;
    if (image_is_missing())
        return -1;
    if (spank_get_item(spank, S_JOB_ID, &job) != ESPANK_SUCCESS ||
        spank_get_item(spank, S_JOB_STEPID, &step) != ESPANK_SUCCESS ||
        spank_get_item(spank, S_TASK_GLOBAL_ID, &task) != ESPANK_SUCCESS)
        return -1;
    snprintf(path, sizeof(path), "%s/%u.%u.%u", records, job, step, task);
    file = fopen(path, "w");
    if (file == NULL) {
        slurm_error("pyxis_standin: %s cannot be written", path);
        return -1;
    }
    for (int at = 0; at < CHOICES; at++) {
        if (given[at] != NULL)
            fprintf(file, "%s=%s%c", choices[at].name, given[at], 0);
    }
    return fclose(file) == 0 ? 0 : -1;
}
