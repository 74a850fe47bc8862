# shellcheck shell=bash
# Stand-in for the environment modules of a site: accepts a few names and sets LOADEDMODULES as the real function does.
module() {
    local name
    if [[ $1 != load ]]; then return 0; fi
    shift
    for name in "$@"; do
        case $name in
            python/* | cuda/* | cudnn/* | nccl/* | hpcx/* | openmpi/*)
                export LOADEDMODULES=${LOADEDMODULES:+$LOADEDMODULES:}$name ;;
            *)
                echo "ERROR: Unable to locate a modulefile for '$name'" >&2
                return 1 ;;
        esac
    done
}
