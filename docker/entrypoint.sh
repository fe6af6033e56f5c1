#!/bin/bash
# Run a command in CANN's environment, as `docker run IMAGE COMMAND` and the last step of the build do.
for top in /usr/local/Ascend "$HOME/Ascend"; do  # the second is where CANN goes when it is installed without root
    for script in "$top/cann/set_env.sh" "$top/ascend-toolkit/set_env.sh"; do
        if [ -f "$script" ]; then
            source "$script"
            [ ! -f "$top/nnal/atb/set_env.sh" ] || source "$top/nnal/atb/set_env.sh"
            break 2
        fi
    done
done
driver=/usr/local/Ascend/driver/lib64
if [ -d "$driver" ]; then  # mounted from the host
    export LD_LIBRARY_PATH="$driver/driver:$driver/common:$LD_LIBRARY_PATH"
elif [ -n "$ASCEND_HOME_PATH" ]; then  # none: CANN brings a stand-in of its library, so that torch_npu can be imported
    machine=$(uname -m)
    for folder in "$ASCEND_HOME_PATH/$machine-linux/devlib" "$ASCEND_HOME_PATH/$machine-linux/devlib/linux/$machine"; do
        [ ! -d "$folder" ] || export LD_LIBRARY_PATH="$LD_LIBRARY_PATH:$folder"
    done
fi
exec "$@"
