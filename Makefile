# SPDX-License-Identifier: Apache-2.0

# Every target works from a clean checkout with Go, git and make. If a target needs more,
# hack/need.sh installs that as root on Debian, and names it elsewhere.

SHELL := /bin/bash
.DEFAULT_GOAL := help
# Tests of several targets would disturb each other: they share the kernel's state, and their times depend on free CPUs.
.NOTPARALLEL:

# The version is the Kubernetes release whose flags, feature gates and metrics the binary has: k8s.io/component-base
# derives from it which gates and metrics are deprecated. Tandem's own version follows as build metadata.
kubernetes := $(shell sed -n 's/^\tk8s.io\/component-base v0\./v1./p' go.mod)
commit := $(shell git rev-parse --short=12 HEAD 2>/dev/null || echo unknown)
describe := $(shell git describe --tags --always --abbrev=12 2>/dev/null || echo unknown)
# Upstream's builds call the state of sources without a repository "archive".
tree := $(shell if s=$$(git status --porcelain 2>/dev/null); then [ -z "$$s" ] && echo clean || echo dirty; else echo archive; fi)
VERSION ?= $(kubernetes)+tandem.$(describe)
# The commit's date rather than today's, so that the same sources make the same binary.
date := $(shell TZ=UTC git log -1 --date=format-local:%Y-%m-%dT%H:%M:%SZ --format=%cd 2>/dev/null || echo 1970-01-01T00:00:00Z)

v := k8s.io/component-base/version
LDFLAGS ?= -s -w \
	-X $(v).gitVersion=$(VERSION) -X $(v).gitCommit=$(commit) -X $(v).gitTreeState=$(tree) -X $(v).buildDate=$(date) \
	-X main.version=$(VERSION) -X $(v).gitMajor=$(word 1,$(subst ., ,$(kubernetes:v%=%))) -X $(v).gitMinor=$(word 2,$(subst ., ,$(kubernetes)))
# LDFLAGS have the revision. With Go's own stamp (-buildvcs), the build fails in a checkout of another user, which git refuses to read.
GOBUILD = CGO_ENABLED=0 go build -trimpath -buildvcs=false -ldflags '$(LDFLAGS)'

# linux/bpf.h includes asm/types.h, which Debian installs in a directory that is named after the architecture.
multiarch = $(shell gcc -print-multiarch 2>/dev/null || echo $$(uname -m)-linux-gnu)
bpf_tools = clang-19=clang-19 llvm-strip-19=llvm-19 /usr/include/bpf/bpf_helpers.h=libbpf-dev /usr/include/linux/bpf.h=linux-libc-dev
export BPF2GO_CFLAGS = -I/usr/include/$(multiarch)

BENCHTIME ?= 1s
FUZZTIME ?= 10s

.PHONY: help
help: ## Show this list
	@echo 'Tandem $(VERSION)'
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: build
build: ## Build bin/kube-proxy and bin/tandemctl (the first time 1 min)
	@mkdir -p bin
	@echo 'Building $(VERSION)'
	@$(GOBUILD) -o bin/ ./cmd/...

.PHONY: generate
generate: ## Compile the BPF programs and write their Go side (20 s)
	@hack/need.sh $(bpf_tools)
	go generate ./proxier/ebpf/lbmap

.PHONY: verify
verify: ## Check format, vet, go.mod, imports, generated files, manifests, licences (30 s; the first time 3 min)
	@hack/need.sh $(bpf_tools)
	hack/verify.sh

.PHONY: check
check: build ## Vet, build and test what needs no root: after every edit (20 s; the first time 2 min, plus downloads)
	hack/test.sh check

.PHONY: test
test: build ## Test everything once, with real traffic on this kernel: before a commit (root; 7 min)
	hack/test.sh check namespaces demo

.PHONY: test-all
test-all: test test-rest test-kubeadm ## Test everything there is, under other kernels as well (root; 1 h 5 min)

.PHONY: test-rest
test-rest: ## What test-all has beyond test: all rounds, race detector, kernels, control plane (40 min)
	hack/test.sh full race kernels cluster

.PHONY: test-cluster
test-cluster: ## Run the proxy as kubeadm does, with a real control plane (5 min; built first: 10 min more)
	hack/test.sh cluster

.PHONY: test-kubeadm
test-kubeadm: ## Follow docs/install.md on a real kubeadm cluster (root; 15 min; built first: 15 min more)
	hack/test.sh kubeadm

.PHONY: test-e2e
test-e2e: ## Run Kubernetes' own end-to-end tests of Services on a kubeadm cluster (root; 20 min; built first: 30 min more)
	hack/test.sh e2e

.PHONY: test-kernels
test-kernels: ## Test under other kernels (30 min; KERNEL='5.10 6.1 6.12 newest'; FULL=1 takes hours)
	KERNEL='$(KERNEL)' FULL='$(FULL)' TESTFLAGS="$(if $(FULL),,-test.short) $$TESTFLAGS" hack/kernels.sh

.PHONY: test-race
test-race: ## Test with the race detector, uncached and shuffled, to find what depends on timing (20 min)
	TESTFLAGS='-count=1 -shuffle=on' hack/test.sh race

.PHONY: bench
bench: ## Run the benchmarks (hours; BENCHTIME=1x for a smoke run of 30 min, BENCH=Connect selects)
	hack/bench.sh $(BENCHTIME)

.PHONY: fuzz
fuzz: ## Fuzz every fuzz target for a moment (FUZZTIME=10s each: 5 min)
	hack/fuzz.sh $(FUZZTIME)

.PHONY: demo
demo: build ## Play a small cluster on this machine and show it working (root; 20 s)
	@$(GOBUILD) -o bin/demo ./test/demo
	bin/demo

.PHONY: docs-check
docs-check: ## Run the commands that documents show, and compare what they say (root; 2 min)
	CGO_ENABLED=0 go test -trimpath ./docs ./observe/explain ./observe/metrics ./observe/shadow
	CGO_ENABLED=0 go test -trimpath ./cmd/kube-proxy/app ./cmd/tandemctl ./test/differential ./test/hosts -run 'Help|Output|Page|Section'
	CGO_ENABLED=0 go test -trimpath -count=1 ./test/demo

.PHONY: demo-shell
demo-shell: build ## Open a shell on a node of the demo's cluster, to try tandemctl (root; see docs/first-hour.md)
	@$(GOBUILD) -o bin/demo ./test/demo
	bin/demo -shell

# An image's tag must not contain a +.
IMAGE ?= tandem-kube-proxy:$(subst +,-,$(VERSION))
PLATFORM ?= linux/$(shell go env GOARCH)

.PHONY: image
image: ## Build the image into bin/image.tar, without a container engine (3 min; IMAGE=…, PLATFORM=linux/amd64,linux/arm64)
	@hack/need.sh apt-get=apt dpkg-deb=dpkg /usr/share/keyrings/debian-archive-keyring.gpg=debian-archive-keyring
	@SOURCE_DATE_EPOCH=$${SOURCE_DATE_EPOCH:-$$(date -d '$(date)' +%s)} go run ./deploy/image/build \
		-name '$(IMAGE)' -version '$(VERSION)' -platforms '$(PLATFORM)' -ldflags '$(LDFLAGS)' -o bin/image.tar

.PHONY: ldflags
ldflags: # Print them, for the Dockerfile and for tests
	@echo '$(LDFLAGS)'

.PHONY: clean
clean: ## Remove what the other targets made
	rm -rf bin .cache coverage.out
	find . -name .git -prune -o -type f \( -name '*.test' -o -name '*.prof' \) -exec rm -f {} +
