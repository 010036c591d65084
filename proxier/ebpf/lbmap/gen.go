// SPDX-License-Identifier: Apache-2.0

package lbmap

// The clang major is pinned, so that everybody generates the same bytes. The
// include path of the distribution's architecture comes with BPF2GO_CFLAGS
// from the Makefile.
//go:generate go tool bpf2go -cc clang-19 -strip llvm-strip-19 -target bpfel,bpfeb -go-package lbmap -output-stem sock -type frontend_key -type frontend -type range_key -type prefix -type node -type backend -type service -type service_stats -type affinity_key -type affinity -type sock_dest -type udp_peer_key -type udp_peer -type port_holder -type successor -type meta -type service_signals -type signal_histogram sock ../../../bpf/sock.bpf.c -- -O2 -g -Wall -Werror -fno-strict-aliasing -mcpu=v3 -I../../../bpf
//go:generate go tool bpf2go -cc clang-19 -strip llvm-strip-19 -target bpfel,bpfeb -go-package lbmap -output-stem tc -no-global-types -type flow_key -type flow -type flow_entry -type uplink -type flow_counter -type flow_list -type port_range -type spread -type target_key tc ../../../bpf/tc.bpf.c -- -O2 -g -Wall -Werror -fno-strict-aliasing -mcpu=v3 -I../../../bpf
//go:generate go tool bpf2go -cc clang-19 -strip llvm-strip-19 -target bpfel,bpfeb -go-package lbmap -output-stem xdp -no-global-types xdp ../../../bpf/xdp.bpf.c -- -O2 -g -Wall -Werror -fno-strict-aliasing -mcpu=v3 -I../../../bpf
//go:generate go tool bpf2go -cc clang-19 -strip llvm-strip-19 -target bpfel,bpfeb -go-package lbmap -output-stem arrival -no-global-types -type cover arrival ../../../bpf/arrival.bpf.c -- -O2 -g -Wall -Werror -fno-strict-aliasing -mcpu=v3 -I../../../bpf
//go:generate go tool bpf2go -cc clang-19 -strip llvm-strip-19 -target bpfel,bpfeb -go-package lbmap -output-stem hold -no-global-types hold ../../../bpf/hold.bpf.c -- -O2 -g -Wall -Werror -fno-strict-aliasing -mcpu=v3 -I../../../bpf
//go:generate go tool bpf2go -cc clang-19 -strip llvm-strip-19 -target bpfel,bpfeb -go-package lbmap -output-stem monitor -no-global-types -type failure -type rate monitor ../../../bpf/monitor.bpf.c -- -O2 -g -Wall -Werror -fno-strict-aliasing -mcpu=v3 -I../../../bpf
//go:generate go run ../../../hack/cenums lbmap enums.go sock_bpfel.o tc_bpfel.o
