/*
 * A plugin of a site that fails on every node as long as a file exists, as pyxis does when its runtime folder is missing.
 * Only steps of srun fail: the batch script begins. slurmstepd then reports "Plugin initialization failed".
 *
 * plugstack.conf:  required /path/failing_plugin.so /path/of/the/file
 *
 * Written after slurm/spank.h and spank(7). Build: gcc -shared -fPIC -o failing_plugin.so failing_plugin.c
 */
#include <slurm/slurm.h>
#include <slurm/spank.h>

#include <stdint.h>
#include <unistd.h>

SPANK_PLUGIN(failing_plugin, 1)

int slurm_spank_init_post_opt(spank_t spank, int argc, char **argv)
{
    uint32_t step = 0;

    if (spank_context() != S_CTX_REMOTE || argc != 1 || access(argv[0], F_OK) != 0)
        return 0;
    if (spank_get_item(spank, S_JOB_STEPID, &step) != ESPANK_SUCCESS || step > SLURM_MAX_NORMAL_STEP_ID)
        return 0;
    slurm_error("failing_plugin: this node is broken");
    return -1;
}
