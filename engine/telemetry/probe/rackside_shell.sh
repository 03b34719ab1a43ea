# Reads a node where the Python probe cannot run: nvidia-smi, amd-smi or rocm-smi, counters of network ports, job sockets.
#
# Sent over SSH to `sh -s`, after assignments of interval_s, interval_ms, poll_s, retry_s, side_every, console, skip,
# new_fields and old_fields. For dash, busybox ash and bash. It decides nothing: what the tools print goes to the
# console as it is. Every line begins with the byte 036 and a section's letter: `L text` is a line, `L+text` the first
# part of a long one, and `.L status` ends the section. Loops that print at the same time stay apart line by line.
#
# Its input tells one thing: at its end the console is gone, and everything that was started here is asked to end.
# Nothing is ever killed outright: a GPU's reader that is killed can freeze the GPU.

mark=$(printf '\036')
newline='
'
piece=3000 # of a long line: one write of this size is never torn apart by another loop's

say() { printf '\036%s %s\n' "$1" "$2"; }

# Not every sleep knows fractions of a second.
nap() { sleep "$1" 2>/dev/null || sleep 1; }

# Frame one line of section $1.
tell() {
    rest=$2
    while [ "${#rest}" -gt "$piece" ]; do
        part=$(printf '%.3000s' "$rest")
        printf '\036%s+%s\n' "$1" "$part"
        rest=${rest#"$part"}
    done
    printf '\036%s %s\n' "$1" "$rest"
}

# Frame standard input as section $1, up to the line that holds the exit status; return that.
frame() {
    while IFS= read -r line || [ -n "$line" ]; do
        case $line in
        "$mark"*)
            printf '\036.%s %s\n' "$1" "${line#"$mark"}"
            return "${line#"$mark"}"
            ;;
        *) tell "$1" "$line" ;;
        esac
    done
}

# When process $1 started, as the kernel counts: with it, a process id is not taken for a later process's.
born() {
    stat='' born='' state='' group=''
    { read -r stat <"/proc/$1/stat"; } 2>/dev/null
    [ -n "$stat" ] || return 1
    # shellcheck disable=SC2086 # the fields after the name, which may hold blanks
    set -- ${stat##*) }
    state=$1 group=$3 born=${20}
}

alive() { born "$1" && [ "$born" = "$2" ] && [ "$state" != Z ]; }

# Run a tool and note under the name $1, as long as it runs, which process it is.
tool() {
    slot=$1
    shift
    "$@" </dev/null 2>&1 &
    if [ -n "$lock" ]; then
        born "$!"
        echo "$! $born" >"$lock/$slot"
    fi
    wait "$!"
    ended=$?
    [ -z "$lock" ] || rm -f "$lock/$slot"
    return "$ended"
}

# section LETTER NAME COMMAND…: one run of a tool, framed; its exit status.
section() {
    letter=$1
    shift
    { tool "$@"; printf '\n\036%s\n' "$?"; } 2>&1 | frame "$letter"
}

# A process of the reader in directory $1 that still runs: its id in $left. With $2, only in that state.
remains() {
    for noted in "$1"/*; do
        pid='' was=''
        { read -r pid was _ <"$noted"; } 2>/dev/null
        if [ -n "$pid" ] && alive "$pid" "$was" && { [ -z "$2" ] || [ "$state" = "$2" ]; }; then
            left=$pid
            return 0
        fi
    done
    return 1
}

# Remove the notes in directory $1 once none of its processes runs; fails when one does not end.
cleared() {
    tries=30
    while remains "$1" ''; do
        tries=$((tries - 1))
        [ "$tries" -gt 0 ] || return 1
        nap 0.1
    done
    rm -rf "$1"
}

refuse() {
    name=''
    { read -r name <"/proc/$left/comm"; } 2>/dev/null
    hung="an earlier ${name:-reader} (process $left) hangs in the driver: none is started beside it"
    return 1
}

# Be this console's one reader here. An earlier one that lost its console is asked to end; where a tool hangs, none is
# started beside it. Without a directory of our own there is nothing to look at, and nothing to note.
claim() {
    lock='' hung=''
    mkdir -m 700 "$place" 2>/dev/null
    if [ ! -d "$place" ] || [ -L "$place" ] || [ ! -O "$place" ]; then
        return 0
    fi
    born "$$"
    mine=$group since=$born
    for old in "$place"/shell-*; do
        [ -d "$old" ] || continue
        main='' was='' leads=''
        { read -r main was leads <"$old/main"; } 2>/dev/null
        if [ -n "$main" ] && alive "$main" "$was"; then
            if [ "${old##*/}" != "shell-$console" ]; then
                # Another console's, and well, unless a tool of it waits in the driver for longer than a moment.
                ! remains "$old" D || { sleep 1; ! remains "$old" D; } || { refuse; return 1; }
                continue
            fi
            [ "$leads" = "$mine" ] || kill -TERM "-$leads" 2>/dev/null
        fi
        cleared "$old" || { refuse; return 1; }
    done
    mkdir -m 700 "$place/shell-$console" 2>/dev/null || return 0
    lock=$place/shell-$console
    echo "$$ $since $mine" >"$lock/main"
}

# The first tool that is there, and which are not. Where the NVIDIA driver is not loaded and AMD's is, nvidia-smi is only
# a leftover.
pick() {
    reader=none missing=''
    [ -e /proc/driver/nvidia ] || [ ! -d /sys/class/kfd ] || skip="$skip nvidia-smi"
    for name in nvidia-smi amd-smi rocm-smi; do
        if ! command -v "$name" >/dev/null 2>&1; then
            missing="$missing $name"
        elif [ "$reader" = none ]; then
            case " $skip " in
            *" $name "*) spare=$name ;;
            *) reader=$name ;;
            esac
        fi
    done
    [ "$reader" != none ] || reader=${spare:-none}
}

# Now, in hundredths of a second since the node started.
clock() {
    up=0.00
    read -r up _ </proc/uptime
    now=${up%.*}${up#*.}
}

# nvidia-smi.

ask() {
    said=$(tool once nvidia-smi --query-gpu="$fields" --format=csv 2>&1)
    status=$?
    printf '%s\n\036%s\n' "$said" "$status" | frame Q
    case $said in
    *"not a valid field"*)
        [ "$fields" != "$old_fields" ] || return 0
        fields=$old_fields
        ask
        ;;
    esac
}

discover() {
    say A discover
    # Clocks that can be set fill most of what is printed, and nobody reads them.
    { tool once nvidia-smi -q -x; printf '\n\036%s\n' "$?"; } 2>&1 | sed '/<supported_graphics_clock>/d' | frame D
    section L once nvidia-smi -L
    section T once nvidia-smi topo -m
    section N once nvidia-smi nvlink -s
}

questions() {
    section N side nvidia-smi nvlink -s
    if [ "$1" = 1 ]; then
        section E side nvidia-smi nvlink -e
        section P side nvidia-smi --query-compute-apps=gpu_uuid,pid,process_name,used_gpu_memory --format=csv
    fi
}

# What is read seldom: beside the stream that goes on, and only when the last such question was answered.
aside() {
    seldom=$((asked % 6 == 0))
    asked=$((asked + 1))
    if [ -z "$lock" ]; then
        questions "$seldom"
    elif [ ! -e "$lock/asks" ]; then
        [ -z "$asks" ] || wait "$asks"
        : >"$lock/asks"
        { questions "$seldom"; rm -f "$lock/asks"; } </dev/null &
        asks=$!
    fi
}

# Frame the stream's lines; whenever the first GPU has come round often enough, ask aside.
follow() {
    first='' rounds=0 asked=0 asks=''
    while IFS= read -r line || [ -n "$line" ]; do
        case $line in
        "$mark"*)
            printf '\036.Q %s\n' "${line#"$mark"}"
            return
            ;;
        esac
        tell Q "$line"
        case $line in
        [0-9]*)
            index=${line%%,*}
            first=${first:-$index}
            if [ "$index" = "$first" ]; then
                [ "$((rounds % side_every))" -ne 0 ] || aside
                rounds=$((rounds + 1))
            fi
            ;;
        esac
    done
}

stream() {
    {
        tool stream nvidia-smi --query-gpu="$fields" --format=csv -lms "$interval_ms"
        printf '\n\036%s\n' "$?"
    } 2>&1 | follow
}

# One stream as long as it lasts. While GPUs are lost it ends at once: then every round is asked for by itself. What is
# found anew begins with all its facts.
nvidia() {
    fields=$new_fields known=''
    while :; do
        ask
        pause=$retry_s
        case $status:$newline$said in
        0:*)
            discover
            known=yes
            clock
            began=$now
            stream
            clock
            [ "$((now - began))" -lt 1000 ] || pause=$interval_s
            ;;
        *"$newline"[0-9]*)
            [ -n "$known" ] || discover
            known=yes pause=$interval_s
            ;;
        esac
        nap "$pause"
    done
}

# amd-smi and rocm-smi: each run by itself, the next when the last has ended.

light='-t -P -u -c -b --showmaxpower --showmeminfo vram --showproductname --showuniqueid --showdriverversion --json'

amd() {
    flags=$light failed=1 polls=0
    while :; do
        clock
        began=$now
        if [ "$reader" = amd-smi ]; then
            [ "$failed" = 0 ] || say A discover
            # Limits are told there, and may change.
            [ "$failed" = 0 ] && [ "$((polls % 30))" != 0 ] || section F once amd-smi static --json
            polls=$((polls + 1))
            section M once amd-smi metric --json
        else
            # shellcheck disable=SC2086 # one flag a word
            section R once rocm-smi $flags
        fi
        if [ "$?" = 0 ]; then
            failed=0
            clock
            took=$(((now - began) / 100))
            [ "$took" -lt "$poll_s" ] || took=$((poll_s - 1))
            sleep "$((poll_s - took))"
        else
            failed=$((failed + 1)) flags='-a --json'
            nap "$retry_s"
        fi
    done
}

# What the kernel tells, from its files and without another process for each.

value_of() {
    value=''
    { read -r value <"$1"; } 2>/dev/null
    [ -z "$value" ] || say S "$1:$value"
}

counters() {
    while :; do
        for port in /sys/class/infiniband/*/ports/*; do
            [ -e "$port/state" ] || continue
            for file in state phys_state rate link_layer; do value_of "$port/$file"; done
            for file in port_rcv_data port_xmit_data symbol_error link_downed port_rcv_errors; do
                value_of "$port/counters/$file"
            done
        done
        for port in /sys/class/net/*; do
            if [ -e "$port/device" ] && [ ! -e "$port/device/infiniband" ]; then
                for file in operstate speed statistics/rx_bytes statistics/tx_bytes; do value_of "$port/$file"; done
            fi
        done
        for folder in "$RACKSIDE_HOOK_DIR" "/run/user/$uid/rackside" "${XDG_RUNTIME_DIR:+$XDG_RUNTIME_DIR/rackside}" \
            "$place"; do
            if [ -n "$folder" ] && [ -d "$folder" ] && [ ! -L "$folder" ] && [ -O "$folder" ]; then
                for socket in "$folder"/*.sock; do
                    [ ! -S "$socket" ] || say S "hook:$socket"
                done
            fi
        done
        value_of /proc/loadavg
        clock
        printf '\036.S %s\n' "$up"
        nap "$interval_s"
    done
}

main() {
    uid=$(id -u)
    place=/tmp/rackside-$uid
    host=''
    { read -r host </proc/sys/kernel/hostname; } 2>/dev/null
    say A "hostname ${host:-$(hostname 2>/dev/null)}"
    pick
    say A "missing$missing"
    say A "reader $reader"
    [ "$reader" != none ] || return 69
    claim || { say W "$hung"; return 75; }
    counters </dev/null &
    case $reader in
    nvidia-smi) nvidia ;;
    *) amd ;;
    esac </dev/null &
    while read -r _; do :; done
    # sshd gives every command a session of its own: its group is this reader and what it started, and nothing else.
    trap '' TERM
    kill -TERM 0
    if [ -n "$lock" ]; then
        rm -f "$lock/main"
        cleared "$lock"
    fi
    return 0
}

main
exit
