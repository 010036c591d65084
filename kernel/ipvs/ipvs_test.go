// SPDX-License-Identifier: Apache-2.0

package ipvs

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestServers(t *testing.T) {
	dir := t.TempDir()
	if list, err := Servers(dir); len(list) != 0 || err != nil {
		t.Errorf("without IPVS: %v, %v", list, err)
	}
	write(t, dir, "ip_vs", `IP Virtual Server version 1.2.1 (size=4096)
Prot LocalAddress:Port Scheduler Flags
  -> RemoteAddress:Port Forward Weight ActiveConn InActConn
TCP  0A600001:01BB rr
  -> AC120002:192B      Masq    1      0          0
UDP  [fd00:0010:0096:0000:0000:0000:0000:000a]:0035 rr persistent 10800
  -> [fd00:0010:0244:0000:0000:0000:0000:0001]:0035 Masq 1 0 0
FWM  00000007 rr
`)
	list, err := Servers(dir)
	if got := fmt.Sprint(list); err != nil || got != "[{TCP 10.96.0.1:443} {UDP [fd00:10:96::a]:53}]" {
		t.Errorf("%s, %v", got, err)
	}
}

func TestConnections(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, "ip_vs_conn", `Pro FromIP   FPrt ToIP     TPrt DestIP   DPrt State       Expires PEName PEData
TCP 0AF40102 9C40 0A600001 01BB AC120002 192B ESTABLISHED     899
TCP 0AF40102 0000 0A600001 01BB AC120002 192B NONE          10799
UDP fd00:0010:0244:0000:0000:0000:0000:0002 9C41 fd00:0010:0096:0000:0000:0000:0000:000a 0035 fd00:0010:0244:0000:0000:0000:0000:0001 14E9 UDP 299
`)
	list, err := Connections(dir)
	const want = "[{TCP 10.244.1.2:40000 10.96.0.1:443 172.18.0.2:6443} {UDP [fd00:10:244::2]:40001 [fd00:10:96::a]:53 [fd00:10:244::1]:5353}]"
	if got := fmt.Sprint(list); err != nil || got != want {
		t.Errorf("%s, %v", got, err)
	}
	for _, bad := range []string{"TCP 0AF401 9C40 0A600001 01BB AC120002 192B ESTABLISHED 899", "TCP 0AF40102 9C40X 0A600001 01BB AC120002 192B ESTABLISHED 899"} {
		write(t, dir, "ip_vs_conn", bad+"\n")
		if list, err := Connections(dir); err == nil || !strings.Contains(err.Error(), "ip_vs_conn") {
			t.Errorf("%q: %v, %v", bad, list, err)
		}
	}
}

func write(t *testing.T, dir, name, text string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}
