#!/usr/bin/env bash
# CPU microseconds per fresh TLS 1.3 handshake with a GET: pqtail's load generator and server beside bare loops and
# other load generators, interleaved in one run. Medians over the rounds.
#
#   bench/compare-peers.sh [ROUNDS [HANDSHAKES]]
#
# Server and client are processes on CPUs of their own (SERVER_CPU, CLIENT_CPU). Handshakes are those that the server
# completed; CPU time is that of the whole process, user and system.
set -euo pipefail
cd "$(dirname "$0")/.."

rounds=${1:-5}
count=${2:-2000}
rate=${RATE:-300}
concurrency=${CONCURRENCY:-1}
server_cpu=${SERVER_CPU:-0}
client_cpu=${CLIENT_CPU:-1}
port=${PORT:-18443}
groups=(x25519 x25519mlkem768)

export PATH="$PWD/target/tools/bin:$PATH"
if [[ -z ${NO_BUILD:-} ]]; then
    cargo build --quiet --release --package pqtail --example bare_rustls --example load_once
fi
binaries=${CARGO_TARGET_DIR:-target}/release/examples
folder=$(mktemp --directory)
trap 'rm --recursive --force "$folder"' EXIT
"$binaries/bare_rustls" identity "$folder/identity"

peers=(oha wrk h2load tls-perf)
clients=(bare pqtail)
missing=()
for peer in "${peers[@]}"; do
    if command -v "$peer" >/dev/null; then clients+=("$peer"); else missing+=("$peer"); fi
done

# field NAME JSON
field() {
    sed --quiet --regexp-extended "s/.*\"$1\":([0-9.]+).*/\1/p" <<<"$2"
}

# Runs one client against one server: run CLIENT SERVER GROUP. Sets client_us and server_us; empty: no handshake came
# to be, as when the client's library lacks the group.
run() {
    local client=$1 server=$2 group=$3 arguments address=127.0.0.1:$port url=https://127.0.0.1:$port/
    arguments=(serve --arm "$group" --address "$address" --identity "$folder/identity.json")
    case $server in
    bare) arguments=("$binaries/bare_rustls" "${arguments[@]}") ;;
    pqtail) arguments=("$binaries/load_once" "${arguments[@]}" --cpu "$server_cpu") ;;
    esac
    coproc SERVER { exec taskset --cpu-list "$server_cpu" "${arguments[@]}"; }
    # The shell forgets these once the server has ended.
    local pid=$SERVER_PID from_server=${SERVER[0]} to_server=${SERVER[1]} line result=
    read -r line <&"$from_server"
    [[ $line == ready ]] || { echo "the server did not start: $line" >&2; exit 1; }

    local on_cpu=(taskset --cpu-list "$client_cpu") seconds
    seconds=$(((count + 1999) / 2000))
    arguments=(load --arm "$group" --address "$address" --identity "$folder/identity.json" --count "$count")
    local TIMEFORMAT='%3U %3S'
    {
        time case $client in
        bare) "${on_cpu[@]}" "$binaries/bare_rustls" "${arguments[@]}" >"$folder/out" ;;
        bare-paced) "${on_cpu[@]}" "$binaries/bare_rustls" "${arguments[@]}" --rate "$rate" >"$folder/out" ;;
        pqtail)
            "${on_cpu[@]}" "$binaries/load_once" "${arguments[@]}" --rate "$rate" --cpu "$client_cpu" >"$folder/out"
            ;;
        oha)
            "${on_cpu[@]}" oha --no-tui --disable-keepalive --cacert "$folder/identity.pem" -c "$concurrency" \
                -n "$count" --connect-to "pqtail.test:$port:$address" "https://pqtail.test:$port/" >"$folder/out" 2>&1
            ;;
        wrk)
            "${on_cpu[@]}" wrk --threads 1 --connections "$concurrency" --duration "${seconds}s" \
                --header 'Connection: close' "$url" >"$folder/out" 2>&1
            ;;
        h2load)
            "${on_cpu[@]}" h2load --h1 --threads 1 --clients "$concurrency" --requests "$count" \
                --header 'Connection: close' "$url" >"$folder/out" 2>&1
            ;;
        tls-perf)
            "${on_cpu[@]}" tls-perf -q -T "$seconds" -t 1 -l "$concurrency" --tls 1.3 127.0.0.1 "$port" \
                >"$folder/out" 2>&1
            ;;
        esac || true
    } 2>"$folder/times"

    exec {to_server}>&-
    read -r result <&"$from_server" || true
    wait "$pid"
    local handshakes
    handshakes=$(field handshakes "$result")
    client_us='' server_us=''
    # A handful may be probes of the tool itself.
    if ((handshakes < count / 10)); then return; fi
    server_us=$(field cpu_us_per_handshake "$result")
    case $client in
    bare* | pqtail) client_us=$(field cpu_us_per_handshake "$(<"$folder/out")") ;;
    *) client_us=$(tail --lines 1 "$folder/times" | awk -v n="$handshakes" '{ print ($1 + $2) * 1e6 / n }') ;;
    esac
}

# median FILE
median() {
    if [[ ! -s $1 ]]; then return; fi
    sort --numeric-sort "$1" |
        awk '{ v[NR] = $1 } END { print NR % 2 ? v[(NR + 1) / 2] : (v[NR / 2] + v[NR / 2 + 1]) / 2 }'
}

# row NAME KIND: medians of both groups with their ratio to the bare loop's.
row() {
    printf '%-22s' "$1"
    local group own bare
    for group in "${groups[@]}"; do
        own=$(median "$folder/$2-$1-$group")
        bare=$(median "$folder/$2-bare-$group")
        if [[ -z $own ]]; then
            printf '%12s %7s' n/a ''
        else
            printf '%12.1f %6.2fx' "$own" "$(awk -v a="$own" -v b="$bare" 'BEGIN { print a / b }')"
        fi
    done
    printf '\n'
}

for client in "${clients[@]}" bare-paced; do
    for group in "${groups[@]}"; do : >"$folder/client-$client-$group"; done
done
for ((round = 0; round < rounds; round++)); do
    for group in "${groups[@]}"; do
        # Rotated, so that drift of the machine falls on all alike.
        all=("${clients[@]}" bare-paced)
        for ((i = 0; i < ${#all[@]}; i++)); do
            client=${all[(i + round) % ${#all[@]}]}
            run "$client" pqtail "$group"
            [[ -z $client_us ]] || echo "$client_us" >>"$folder/client-$client-$group"
            [[ $client != bare || -z $server_us ]] || echo "$server_us" >>"$folder/server-pqtail-$group"
            if [[ $client == bare ]]; then
                run bare bare "$group"
                echo "$server_us" >>"$folder/server-bare-$group"
            fi
        done
    done
    echo "round $((round + 1)) of $rounds" >&2
done

printf 'CPU us per handshake, median of %s rounds of %s\n\n' "$rounds" "$count"
printf '%-22s%12s %7s%12s %7s\n' 'client' "${groups[0]}" '' "${groups[1]}" ''
for client in "${clients[@]}" bare-paced; do row "$client" client; done
printf '\n%-22s\n' 'server'
for server in bare pqtail; do row "$server" server; done
printf '\nClients against pqtail'\''s server, servers under the bare client. bare runs closed loop, bare-paced and\n'
printf 'pqtail at %s/s (pqtail with Poisson arrivals), the others closed loop with %s connection(s).\n' \
    "$rate" "$concurrency"
printf 'wrk and h2load verify no certificate, tls-perf sends no GET. n/a: the tool made no handshake over this group.\n'
((${#missing[@]} == 0)) || printf 'Not installed: %s\n' "${missing[*]}"
