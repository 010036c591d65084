// SPDX-License-Identifier: Apache-2.0

//go:build linux

package lab

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
)

// HelperEnv makes a copy of the running program a server, as SpawnServer starts them. Its value is the
// name that the server answers with, a space, and its port.
const HelperEnv = "TANDEM_LAB_HELPER"

var mainCalled bool

// Main runs the server if this process was started as a server process, and then does
// not return. Programs that use SpawnServer call it at the start of main, tests call it in
// TestMain.
func Main() {
	mainCalled = true
	role := os.Getenv(HelperEnv)
	if role == "" {
		return
	}
	fmt.Fprintf(os.Stderr, "lab helper: %v\n", serveUntilKilled(role))
	os.Exit(1)
}

// ServerProcess is a TCP and UDP server in a process of its own, so that it can be
// stopped or killed like a real one.
type ServerProcess struct {
	*Cmd
	Port uint16
}

// SpawnServer starts a process in the sandbox that serves TCP and UDP on the port
// like ServeTCP and ServeUDP, and returns when it listens. Close kills it.
func (s *Sandbox) SpawnServer(port uint16) (_ *ServerProcess, err error) {
	defer func() { err = wrap(err, "start server process in %s", s.Name) }()
	if !mainCalled {
		return nil, errors.New("main or TestMain did not call lab.Main")
	}
	exe, err := os.Executable()
	if err != nil {
		return nil, err
	}
	c := s.Command(context.Background(), exe)
	c.Env = append(os.Environ(), fmt.Sprintf("%s=%s %d", HelperEnv, s.Name, port))
	c.Stderr = os.Stderr
	out, err := c.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := c.Start(); err != nil {
		return nil, err
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		return nil, errors.Join(fmt.Errorf("wait for it to listen: %w", err), c.Close())
	}
	got, err := strconv.ParseUint(strings.TrimSpace(line), 10, 16)
	if err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return &ServerProcess{Cmd: c, Port: uint16(got)}, nil
}

// serveUntilKilled is the helper process. It starts in the right namespace and cgroup, so
// its sandbox can use any thread.
func serveUntilKilled(role string) error {
	name, number, _ := strings.Cut(role, " ")
	port, err := strconv.ParseUint(number, 10, 16)
	if err != nil {
		return err
	}
	here := &Sandbox{Name: name, pool: &pool{enter: func() error { return nil }}, open: map[io.Closer]struct{}{}}
	tcp, err := here.ServeTCP(uint16(port))
	if err != nil {
		return err
	}
	if _, err := here.ServeUDP(tcp.Port); err != nil {
		return err
	}
	if _, err := fmt.Println(tcp.Port); err != nil {
		return err
	}
	select {}
}
