# Run "make" to see what there is.

SHELL       := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

GO       ?= go
FUZZTIME ?= 30s

BROKER = $(GO) run ./internal/broker/cmd/broker

# Packages whose tests need no broker.
UNIT = $$($(GO) list ./... | grep -v -e /integration -e /internal/broker -e /internal/proxy)

.PHONY: help
help: ## Show this
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' Makefile

.PHONY: demo
demo: ## Run examples/quickstart with a real broker, which is started and ended; with one in memory where none can be had
	@$(BROKER) run any-or-none -- $(GO) run ./examples/quickstart

.PHONY: examples
examples: ## Run examples/p1 to p8, each an old retry system and its answer, night-shift and central-retrier, with a real broker
	@$(BROKER) run any -- bash -c 'for e in examples/p*/ examples/night-shift/ examples/central-retrier/; do echo "=== $$e"; $(GO) run "./$$e" || exit 1; done'

.PHONY: orders
orders: ## Run examples/orders: an order service with PostgreSQL whose parts are killed all the time, and whose books balance
	@$(BROKER) run any postgres -- $(GO) run ./examples/orders -torture $(ORDERSFLAGS)

.PHONY: observe
observe: ## Start RabbitMQ, and Prometheus with hopback's alerts, until ^C; without an image from a registry. Your service's metrics are read from port 9464
	@$(BROKER) run any prometheus -- sh -c 'tail -f /dev/null & trap "kill $$!; exit 0" INT TERM; echo "RabbitMQ at $$HOPBACK_URL; Prometheus at $$HOPBACK_PROMETHEUS_URL; ^C ends them"; wait'

.PHONY: test
test: ## Lint, then all tests with RabbitMQ 4.3 and 4.0, which are started and ended
	@tools/test.sh

.PHONY: unit
unit: ## The tests that need no broker
	@{ set +e; $(GO) test -race -count=1 -json $(UNIT); $(GO) test -count=1 -run '^TestAllocations' -json ./client ./retry ./hopbackotel; $(GO) test -race -count=1 -json ./adapter/officialclient ./hopbackotel ./cmd/hopback/... ./topologyfile ./examples/snippets/...; } | $(GO) run ./internal/tally

.PHONY: quick
quick: ## The tests that need no broker, and those of integration with brokers in memory, beside each other; without the race detector, within a minute
	@memory=$$(mktemp); trap 'rm -f "$$memory"' EXIT; \
	{ set +e; $(GO) test -json ./integration -brokers=memory -parallel=64 >"$$memory" & \
	$(GO) test -json $(UNIT) ./adapter/officialclient ./hopbackotel ./cmd/hopback/... ./topologyfile ./examples/snippets/...; \
	wait; cat "$$memory"; } | $(GO) run ./internal/tally

.PHONY: lint
lint: ## Check formatting, go vet and staticcheck, in all modules
	@files=$$(gofmt -l .); [ -z "$$files" ] || { printf 'gofmt -w is needed for:\n%s\n' "$$files"; exit 1; }
	@$(GO) vet work
	@GOWORK=off $(GO) -C tools build -o ../bin/staticcheck honnef.co/go/tools/cmd/staticcheck
	@bin/staticcheck work
	@echo "lint: nothing found"

.PHONY: fuzz
fuzz: ## Run each fuzz target for FUZZTIME (30s)
	@for package in $(UNIT) ./topologyfile; do \
		for target in $$($(GO) test -list '^Fuzz' $$package | grep '^Fuzz' || true); do \
			echo "$$package $$target"; \
			$(GO) test -run '^$$' -fuzz "^$$target\$$" -fuzztime $(FUZZTIME) -fuzzminimizetime 100x $$package; \
		done; \
	done

.PHONY: release
release: ## Pack all modules as VERSION (v0.1.0) into a local proxy, install and build from there as users do, and print the tags
	@GOWORK=off $(GO) -C tools run ./release $(or $(VERSION),v0.1.0)

.PHONY: differ
differ: ## Compare the RabbitMQ in memory with real ones: random sequences of 100,000 operations with each version; DIFFERFLAGS="-differ.seed=7 -differ.operations=1" repeats one
	@$(GO) test -count=1 -timeout=0 -v -run '^TestRandomSequencesComeToTheSame$$' ./integration/differ -args -differ.operations=100000 $(DIFFERFLAGS) | grep -v -e '^=== '

.PHONY: bench
bench: ## Compare with other clients on a broker of our own; writes bench/latest.json; BENCHFLAGS=-quick takes a few minutes
	@$(BROKER) run any -- bash -c 'cd bench && HOPBACK_BENCH_URL="$$HOPBACK_URL" $(GO) run . -json latest.json $(BENCHFLAGS)'

.PHONY: simulate
simulate: ## Break a RabbitMQ in memory in virtual time, 10,000 faults and 1,000,000 messages in some ten minutes; SIMULATEFLAGS="-simulate.seed 7 -simulate.seeds 1" repeats a schedule
	@GOGC=800 GOMEMLIMIT=2GiB $(GO) test -count=1 -timeout=0 -v -run '^TestSimulate$$' ./internal/chaos -args -simulate.seeds 100 -simulate.messages 5100 -simulate.faults 50 $(SIMULATEFLAGS) | grep -v -e '^=== ' -e '--- PASS'

.PHONY: planted
planted: ## Plant five faults in hopback, and see that simulations find each within a minute
	@GOGC=400 $(GO) test -count=1 -v -run '^TestPlantedFaultsAreFound$$' ./internal/chaos -args -simulate.planted | grep -v '^=== '

.PHONY: chaos
chaos: ## Break everything around hopback and count; CHAOSFLAGS="-messages 50000 -faults 13 -nodes 1" takes minutes
	@mkdir -p bin && $(GO) build -o bin/chaos ./internal/chaos/cmd/chaos && bin/chaos $(CHAOSFLAGS)

.PHONY: broker-up
broker-up: ## Start RabbitMQ 4.3 and 4.0 and leave them running
	@$(BROKER) up --env

.PHONY: broker-down
broker-down: ## End them
	@$(BROKER) down

.PHONY: clean
clean: ## End brokers, and remove the images and the cache that were made for them
	@$(BROKER) clean
	@rm -rf bin coverage.out
