// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"errors"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/tandem-proxy/tandem/servicelb"
)

// TestKlipper: the DaemonSet of klipper-lb goes once the Service has addresses, that of a Service without an address stays, and one that
// is made again stays too.
func TestKlipper(t *testing.T) {
	set := func(service, uid string) *appsv1.DaemonSet {
		return &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{
			Namespace: "kube-system", Name: "svclb-" + service, UID: types.UID(uid),
			Labels: map[string]string{servicelb.LabelServiceName: service, servicelb.LabelServiceNamespace: "ns"},
		}}
	}
	w := start(t, Options{DeleteKlipper: true}, newNode("n1", "10.0.0.1"), newService("a", 80), newService("b", 22), set("a", "1"), set("b", "2"))
	w.klipper.interval = 0
	w.run()
	w.has("a", "10.0.0.1")
	await(t, "the DaemonSet of a to be deleted", func() error {
		list, err := w.client.AppsV1().DaemonSets("kube-system").List(t.Context(), metav1.ListOptions{})
		if err == nil && (len(list.Items) != 1 || list.Items[0].Name != "svclb-b") {
			err = errors.New(strings.Join(w.names(list.Items), ", "))
		}
		w.changed()
		return err
	})
	w.says("Normal DeletedKlipper the nodes serve the Service; deleted DaemonSet kube-system/svclb-a of klipper-lb")
	if _, err := w.client.AppsV1().DaemonSets("kube-system").Create(t.Context(), set("a", "3"), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	w.changed()
	w.says("Warning KlipperReturned DaemonSet kube-system/svclb-a was deleted and is there again: K3s' controller runs. " +
		"Start the servers with --disable=servicelb, or turn this controller off")
}

func (*world) names(list []appsv1.DaemonSet) (names []string) {
	for i := range list {
		names = append(names, list[i].Name)
	}
	return names
}
