# Run "make" for a list of targets.

SHELL       := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

GO       ?= go
FUZZTIME ?= 30s

BROKER = $(GO) run ./integration/rabbitmq/cmd/broker

# What runs when is in integration/testrun/plan.go.
TESTRUN = $(GO) build -o bin/testrun ./integration/testrun && GO=$(GO) exec bin/testrun

# Packages with fuzz targets are among these.
UNIT = $$($(GO) list ./... | grep -v /integration)

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' Makefile

.PHONY: demo
demo: ## Run examples/quickstart: starts RabbitMQ and stops it afterwards, or uses the one in memory
	@$(BROKER) run any-or-none -- $(GO) run ./examples/quickstart

.PHONY: examples
examples: ## Run the examples p1 to p8, night-shift, and central-retrier with a real broker
	@$(BROKER) run any -- bash -c 'for e in examples/p?-*/ examples/night-shift/ examples/central-retrier/; do echo "=== $$e"; $(GO) run "./$$e" || exit 1; done'

.PHONY: orders
orders: ## Run examples/orders: an order service with PostgreSQL whose processes are killed while it works
	@$(BROKER) run any postgres -- $(GO) run ./examples/orders -torture $(ORDERSFLAGS)

.PHONY: observe
observe: ## Start RabbitMQ, and Prometheus with hopback's alerts, until ^C; Prometheus reads your service's metrics from port 9464
	@$(BROKER) run any prometheus -- sh -c 'tail -f /dev/null & trap "kill $$!; exit 0" INT TERM; echo "RabbitMQ at $$HOPBACK_URL; Prometheus at $$HOPBACK_PROMETHEUS_URL; ^C stops them"; wait'

.PHONY: test
test: ## Lint, run the unit tests, and the integration tests in memory and with RabbitMQ 4.3, which it starts and stops
	@$(TESTRUN) test

.PHONY: test-all
test-all: ## Run everything: also RabbitMQ 4.0, 4.4 in memory, the race detector, brokers that die, clusters, examples, databases, a browser
	@$(TESTRUN) all

.PHONY: test-rest
test-rest: ## Run what test-all runs and test doesn't
	@$(TESTRUN) rest

.PHONY: stress
stress: ## Run everything next to 30 busy processes
	@$(TESTRUN) stress

.PHONY: unit
unit: ## Run the tests that need no broker
	@$(TESTRUN) unit

.PHONY: quick
quick: ## Run the unit tests, and the integration tests with brokers in memory, without the race detector
	@$(TESTRUN) quick

.PHONY: integration
integration: ## Run the integration tests with one series of RabbitMQ, in Docker: SERIES=4.1
	@$(TESTRUN) $(or $(SERIES),4.3)

.PHONY: lint
lint: ## Run gofmt, go vet, and staticcheck, in all modules
	@files=$$(gofmt -l .); [ -z "$$files" ] || { printf 'gofmt -w is needed for:\n%s\n' "$$files"; exit 1; }
	@$(GO) vet work
	@GOWORK=off $(GO) -C integration/tools build -o ../../bin/staticcheck honnef.co/go/tools/cmd/staticcheck
	@bin/staticcheck work
	@echo "lint: nothing found"

.PHONY: fuzz
fuzz: ## Run each fuzz target for FUZZTIME (default: 30s)
	@for package in $(UNIT) ./operate/topologyfile; do \
		for target in $$($(GO) test -list '^Fuzz' $$package | grep '^Fuzz' || true); do \
			echo "$$package $$target"; \
			$(GO) test -run '^$$' -fuzz "^$$target\$$" -fuzztime $(FUZZTIME) -fuzzminimizetime 100x $$package; \
		done; \
	done

.PHONY: site
site: ## Build the playground, a static page with RabbitMQ in the browser, and the docs, into bin/site; "hopback playground" serves them
	@$(GO) run ./operate/playground -o bin/site
	@GOWORK=off $(GO) -C integration/tools run ./docsite -docs "$(CURDIR)/docs" -o "$(CURDIR)/bin/site/docs"

.PHONY: release
release: ## Pack all modules as VERSION (default: the one in the go.mod files) into a local proxy, install and build from it, write binaries, SBOMs, and checksums into bin/release, and print the tags
	@GOWORK=off $(GO) -C integration/tools run ./release -artifacts "$(CURDIR)/bin/release" $(RELEASEFLAGS) $(or $(VERSION),$$(awk '$$1 == "github.com/hopback/hopback" { print $$2 }' cmd/hopback/go.mod))

.PHONY: differ
differ: ## Compare the RabbitMQ in memory with real ones, by 100,000 random operations for each version; DIFFERFLAGS="-differ.seed=7 -differ.operations=1" repeats a sequence
	@$(GO) test -count=1 -timeout=0 -v -run '^TestRandomSequencesComeToTheSame$$' ./integration/differ -args -differ.operations=100000 $(DIFFERFLAGS) | grep -v -e '^=== '

.PHONY: bench
bench: ## Compare with other clients on a private broker, and write integration/bench/latest.json; BENCHFLAGS=-quick takes a few minutes
	@$(BROKER) run any -- bash -c 'cd integration/bench && HOPBACK_BENCH_URL="$$HOPBACK_URL" $(GO) run . -json latest.json $(BENCHFLAGS)'

.PHONY: simulate
simulate: ## Inject 10,000 faults into a RabbitMQ in memory, in virtual time, in about ten minutes; SIMULATEFLAGS="-simulate.seed 7 -simulate.seeds 1" repeats a schedule
	@GOGC=800 GOMEMLIMIT=2GiB $(GO) test -count=1 -timeout=0 -v -run '^TestSimulate$$' ./integration/chaos -args -simulate.versions 4.3.6,4.0.5,4.4.0 -simulate.seeds 67 -simulate.messages 5100 -simulate.faults 50 $(SIMULATEFLAGS) | grep -v -e '^=== ' -e '--- PASS'

.PHONY: days
days: ## Simulate 1,000 days with 1,500 faults, hours to days apart, in about an hour; SIMULATEFLAGS="-simulate.seed 7 -simulate.seeds 1" repeats a month
	@GOGC=800 GOMEMLIMIT=2GiB $(GO) test -count=1 -timeout=0 -v -run '^TestSimulate$$' ./integration/chaos -args -simulate.stretch 720 -simulate.versions 4.3.6,4.0.5,4.4.0 -simulate.seeds 11 -simulate.messages 1500 -simulate.faults 48 $(SIMULATEFLAGS) | grep -v -e '^=== ' -e '--- PASS'

.PHONY: planted
planted: ## Plant 24 bugs in hopback, and check that simulations find each within a minute
	@GOGC=400 $(GO) test -count=1 -v -run '^TestPlantedFaultsAreFound$$' ./integration/chaos -args -simulate.planted | grep -v '^=== '

.PHONY: chaos
chaos: ## Inject faults into brokers, network, and workers, and account for every message; CHAOSFLAGS="-messages 50000 -faults 13 -nodes 1" takes minutes
	@mkdir -p bin && $(GO) build -o bin/chaos ./integration/chaos/cmd/chaos && bin/chaos $(CHAOSFLAGS)

.PHONY: broker-up
broker-up: ## Start RabbitMQ 4.3 and 4.0 and leave them running
	@$(BROKER) up --env

.PHONY: broker-down
broker-down: ## Stop them
	@$(BROKER) down

.PHONY: clean
clean: ## Stop brokers, and remove their images and cache
	@$(BROKER) clean
	@rm -rf bin coverage.out
