#!/bin/bash
# What recording costs the recorded: runs with and without probes in turn, so that drift of the machine meets both alike.
# Usage: bench/probe-cost.sh [ROUNDS] [flags of `pqtail run`]     needs root, jq, and `cargo build --release`
set -euo pipefail
cd "$(dirname "$0")/.."

rounds=${1:-5}
shift || true
flags=("$@")
[ ${#flags[@]} -gt 0 ] || flags=(--rate 300 --duration 10s --warmup 2s --trials 1)

command -v jq >/dev/null || { echo "probe-cost: needs jq (apt-get install jq)" >&2; exit 1; }
[ -x target/release/pqtail ] || { echo "probe-cost: needs target/release/pqtail: cargo build --release" >&2; exit 1; }

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

for ((round = 1; round <= rounds; round++)); do
    # A run may judge itself invalid (few trials): its figures are compared here all the same.
    for probes in on off; do
        echo "probe-cost: round $round of $rounds, probes $probes" >&2
        extra=()
        [ "$probes" = on ] || extra=(--no-probes)
        target/release/pqtail run --quiet --json --seed "$round" --results "$scratch/runs" "${flags[@]}" "${extra[@]}" |
            jq --arg probes "$probes" --argjson round "$round" -c '
                .arms | to_entries[] | {probes: $probes, round: $round, arm: .key,
                client_cpu: .value.client_cpu_ns_per_request, server_cpu: .value.server_cpu_ns_per_request,
                p50: .value.percentiles_ns.p50, p99: .value.percentiles_ns.p99}' >>"$scratch/figures"
        rm -rf "$scratch/runs"
    done
done

jq -s -r '
    def median: sort | .[length / 2 | floor];
    def us: . / 1000 * 10 | round / 10;
    (["arm", "figure", "off, us", "on, us", "ratio of pairs"] | @tsv),
    (group_by(.arm)[] as $arm | ["client_cpu", "server_cpu", "p50", "p99"][] as $figure |
        ($arm | group_by(.round) | map({on: (.[] | select(.probes == "on") | .[$figure]),
                                        off: (.[] | select(.probes == "off") | .[$figure])})) as $pairs |
        [$arm[0].arm, $figure, ($pairs | map(.off) | median | us), ($pairs | map(.on) | median | us),
         ($pairs | map(.on / .off) | median * 1000 | round / 1000)] | @tsv)
' "$scratch/figures" | column -t -s "$(printf '\t')"
