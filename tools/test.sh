#!/usr/bin/env bash
# "make test": lint, and all tests, with RabbitMQ 4.3 and 4.0. Two lanes run beside each
# other, since each waits for much of its time: what needs no broker that is shared, and
# what does. The first time on a machine the brokers take a minute or so to build. Brokers
# that run already are used and left running.
set -uo pipefail
cd "$(dirname "$0")/.."
GO=${GO:-go}
versions=(4.3 4.0)
# Test binaries without tables for a debugger are linked in two thirds of the time.
# lint vets them. With -trimpath a fresh clone finds in the build cache what another has
# compiled and checked; without it, lint alone takes 75 seconds of CPU more there.
export GOFLAGS="${GOFLAGS:-} -trimpath -ldflags=-w -vet=off"
# Compilers, linters and tests collect garbage less often, for a tenth less CPU.
export GOGC="${GOGC:-300}"
# The brokers take most of the CPU. So they take a third less.
export HOPBACK_BROKER_LEAN=1

bin=$(mktemp -d)
started=() up= beside=
end_brokers() {
	if [ -n "$up" ]; then
		kill -TERM "$up" 2>/dev/null # it ends what it has half started
		wait "$up"
		up=
	fi
	[ ${#started[@]} -eq 0 ] || "$bin/broker" down "${started[@]}"
	started=()
}
trap '[ -z "$beside" ] || kill -TERM -- "-$beside" 2>/dev/null; end_brokers; kill $(jobs -p) 2>/dev/null; rm -rf "$bin"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

race=-race
if [ "$($GO env CGO_ENABLED)" != 1 ] || ! command -v "$($GO env CC)" >/dev/null; then
	echo "no C compiler, so without the race detector; install gcc to have it"
	race=
fi

$GO build -o "$bin/" ./internal/broker/cmd/broker ./internal/tally || exit 1
for v in "${versions[@]}"; do
	"$bin/broker" status --quiet "$v" || started+=("$v")
done
"$bin/broker" up "${versions[@]}" &
up=$!

exec 3> >(exec "$bin/tally" -again "$bin/again")
tally=$!
# phase tells where the time goes.
phase() { echo "after $SECONDS s: $1"; }
lane=3 # where results go: see below
failed() { echo "{\"Action\":\"fail\",\"Package\":\"$1\"}" >&$lane; }
# aside runs a command beside what follows, until join_aside hands on what it has printed:
# the tally tells tests apart as long as one's lines aren't between another's.
asides=()
aside() {
	"${@:2}" >"$bin/$1.json" &
	asides+=("$1 $!")
}
join_aside() {
	local one
	for one in "${asides[@]}"; do
		wait "${one#* }"
		cat "$bin/${one% *}.json" >&$lane
	done
	asides=()
}
# -count=1, as what a broker does is not in the test cache's key.
run_tests() { $GO test $race -count=1 -timeout=25m -json "$@" >&$lane; }

# The other modules of go.work. Their tests mostly wait: for a PostgreSQL, a Redis and a
# Prometheus. So they run while the rest does.
modules() {
	$GO test $race -p=1 -count=1 -timeout=25m -json ./adapter/officialclient ./hopbackotel ./cmd/hopback/... ./topologyfile ./postgres/... \
		./middleware/dedupe/redisstore
	$GO test -count=1 -timeout=10m -json ./hopbackotel/dashboards
}

mapfile -t unit < <($GO list ./... | grep -v -e /integration -e /internal/broker -e /internal/proxy)
mapfile -t timed < <($GO list ./internal/proxy ./examples/...)
# These mostly wait for brokers of their own to start and to die.
mapfile -t faulty < <($GO list ./internal/broker/... ./integration/chaos ./integration/cluster | grep -v /cmd/broker)

# What needs none of the brokers that are shared.
without_brokers() {
	set +m
	aside modules modules
	phase "lint"
	${MAKE:-make} --no-print-directory lint || failed lint
	phase "tests that need no broker"
	run_tests "${unit[@]}"
	# Allocations are counted without the race detector, which makes some of its own.
	[ -z "$race" ] || $GO test -count=1 -timeout=1m -run '^TestAllocations' -json ./client ./retry ./hopbackotel >&$lane
	# With a broker in memory the race detector looks on. With the real ones, which take most
	# of the CPU, it would only make everything slower once more.
	phase "integration, in memory"
	# The last tests of each mostly wait, so both run at once.
	aside memory-4.0 $GO test -count=1 -timeout=25m -json ./integration -brokers=memory-4.0
	run_tests ./integration -brokers=memory-4.3
	phase "brokers that die"
	run_tests -p=3 "${faulty[@]}"
	phase "modules of their own"
	join_aside
	phase "what needs none of the shared brokers is done"
}

# What needs them.
with_brokers() {
	phase "integration, with real brokers"
	# Tests that need a broker for themselves mostly wait for it, one after the other. The
	# rest needn't wait for them.
	local single
	single="^($(paste -sd'|' integration/alone.txt))\$"
	aside single $GO test -count=1 -timeout=25m -json -run "$single" ./integration -brokers=real
	$GO test -count=1 -timeout=25m -json -skip "$single" ./integration -brokers=real >&$lane
	join_aside
	phase "fresh brokers"
	# A broker that has had all of that can take over 5 s to start a quorum queue for
	# minutes, and RabbitMQ 4.3 gives up then (cluster_not_formed). So the rest gets fresh ones.
	if [ ${#started[@]} -gt 0 ]; then
		"$bin/broker" down "${started[@]}"
		# Docker may still be removing the old ones.
		for pause in 5 10 20 0; do
			"$bin/broker" up "${started[@]}" && break
			[ $pause -gt 0 ] || failed "integration: no fresh broker"
			sleep $pause
		done
	fi
	# Most of the time of these is waiting. Lateness is measured in examples, so one at a time.
	phase "examples, a browser, random sequences, other clients, OpenTelemetry, the outbox"
	aside timed $GO test $race -p=1 -count=1 -timeout=25m -json "${timed[@]}"
	# The tests install Chromium where they can. Elsewhere they are skipped, and say so.
	aside browser $GO test -count=1 -timeout=15m -json ./integration/browser
	aside differ $GO test -count=1 -timeout=10m -json ./integration/differ
	# It takes the shared broker where one runs, so not while that is replaced.
	aside command $GO test $race -count=1 -timeout=10m -json ./internal/broker/cmd/broker
	$GO test $race -count=1 -timeout=25m -json ./adapter/officialclient/integration >&$lane
	$GO test -count=1 -timeout=25m -json ./bench/interop >&$lane
	$GO test $race -count=1 -timeout=25m -json ./hopbackotel/integration >&$lane
	HOPBACK_TEST_BROKERS=real $GO test -count=1 -timeout=10m -run '^Test(WhatTheBrokerLacks|WhatIsForbidden|MessageSigned)' -json ./postgres/outbox >&$lane
	join_aside
}

# Both lanes have tests of the same names, so the tally reads one after the other: this one
# at once, the other when it is whole.
set -m # a process group of its own, so that it can be ended as a whole
without_brokers &
beside=$!
set +m

lane=4
exec 4>"$bin/with_brokers.json"
wait "$up"
came_up=$?
up=
if [ $came_up -eq 0 ]; then
	with_brokers
else
	failed "integration: no broker"
fi
exec 4>&-
wait "$beside"
beside=
cat "$bin/with_brokers.json" >&3
phase "done"
exec 3>&-
wait "$tally"
result=$?
# A test that a noisy machine has failed passes by itself. One that is wrong doesn't.
if [ $result -ne 0 ] && [ -s "$bin/again" ]; then
	echo "run again, each by itself:"
	cat "$bin/again"
	while read -r package test; do
		$GO test $race -count=1 -timeout=15m -json -run "^$test\$" "$package"
	done <"$bin/again" | "$bin/tally"
	result=${PIPESTATUS[1]}
fi
end_brokers
exit "$result"
