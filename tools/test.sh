#!/usr/bin/env bash
# Runs "make test": lint, and all tests with RabbitMQ 4.3 and 4.0. The first
# time on a machine the brokers take a minute to build, so lint and compilation
# go on meanwhile. Brokers that run already are used and left running.
set -uo pipefail
cd "$(dirname "$0")/.."
GO=${GO:-go}
versions=(4.3 4.0)

bin=$(mktemp -d)
started=() up=
finish() {
	if [ -n "$up" ]; then
		kill -TERM "$up" 2>/dev/null # it ends what it has half started
		wait "$up"
	fi
	[ ${#started[@]} -eq 0 ] || "$bin/broker" down "${started[@]}"
	rm -rf "$bin"
}
trap 'finish >&2' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

race=-race
if [ "$($GO env CGO_ENABLED)" != 1 ] || ! command -v "$($GO env CC)" >/dev/null; then
	echo "no C compiler, so without the race detector; install gcc to have it" >&2
	race=
fi

failed=()
$GO build -o "$bin/" ./integration/broker/cmd/broker ./internal/tally || exit 1
for v in "${versions[@]}"; do
	"$bin/broker" status --quiet "$v" || started+=("$v")
done
"$bin/broker" up "${versions[@]}" &
up=$!

${MAKE:-make} --no-print-directory lint || failed+=(--failed lint)
$GO list -test -export $race ./... >/dev/null 2>&1 # compiles without running; what fails is told below

packages=$($GO list ./...)
if wait "$up"; then
	up=
else
	up=
	failed+=(--failed "no broker, so no integration tests")
	packages=$(grep -v -e /integration -e /examples <<<"$packages")
fi
# -count=1: what a broker does is not in the test cache's key.
# shellcheck disable=SC2086 # packages and race are lists of words
$GO test $race -count=1 -timeout=8m -json $packages 2>&1 | "$bin/tally" "${failed[@]}"
