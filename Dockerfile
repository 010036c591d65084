# SPDX-License-Identifier: Apache-2.0
#
# The image: kube-proxy at the same path as in upstream's image, tandemctl, and the tools that
# kube-proxy runs; no shell, no package manager. 'make image' builds it. No stage runs a program
# of the target architecture, so any machine can build every architecture without emulation.

ARG GO=1.26
ARG DEBIAN=trixie

FROM --platform=$BUILDPLATFORM docker.io/library/golang:$GO-$DEBIAN AS programs
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY . .
ARG TARGETARCH LDFLAGS
RUN export GOOS=linux GOARCH=$TARGETARCH && \
    make build ${LDFLAGS:+LDFLAGS="$LDFLAGS"} && \
    CGO_ENABLED=0 go build -trimpath -buildvcs=false -ldflags '-s -w' -o bin/ ./deploy/image/iptables-wrapper

FROM --platform=$BUILDPLATFORM docker.io/library/debian:$DEBIAN-slim AS tools
ARG TARGETARCH DEBIAN SOURCE_DATE_EPOCH
COPY deploy/image/debs.sh deploy/image/rootfs.sh /
RUN DEBIAN_SUITE=$DEBIAN /rootfs.sh /root-of-image "$TARGETARCH"

FROM scratch
COPY --from=tools /root-of-image /
COPY --from=programs /src/bin/kube-proxy /src/bin/tandemctl /src/bin/servicelb /src/bin/iptables-wrapper /usr/local/bin/
ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
ENTRYPOINT ["/usr/local/bin/kube-proxy"]
