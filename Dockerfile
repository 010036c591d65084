# SPDX-License-Identifier: Apache-2.0
#
# The image where no Debian is at hand: kube-proxy at the same path as in upstream's image, tandemctl, and the tools that
# kube-proxy runs; no shell, no package manager. 'make image' makes the same file system without a container engine. No stage runs
# a program of the target architecture, so any machine can build every architecture without emulation.

# An exact release, as the programs depend on it; the tag 1.26 moves to the next one.
ARG GO=1.26.8
ARG DEBIAN=trixie

FROM --platform=$BUILDPLATFORM docker.io/library/golang:$GO-$DEBIAN AS build
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
# With .git, which has the version and revision that the programs state.
COPY . .
ARG TARGETARCH LDFLAGS SOURCE_DATE_EPOCH
RUN ldflags=$(make -s ldflags) && go run ./deploy/image/build -root /image -platforms linux/$TARGETARCH -ldflags "$ldflags"

FROM scratch
COPY --from=build /image /
ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
ENTRYPOINT ["/usr/local/bin/kube-proxy"]
