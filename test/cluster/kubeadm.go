// SPDX-License-Identifier: Apache-2.0

//go:build linux

package cluster

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/kubernetes/cmd/kubeadm/app/componentconfigs"
	"k8s.io/kubernetes/cmd/kubeadm/app/constants"
	"k8s.io/kubernetes/cmd/kubeadm/app/phases/addons/proxy"
	"k8s.io/kubernetes/cmd/kubeadm/app/util/config"

	"github.com/tandem-proxy/tandem/test/kubeadm"
)

// ProxyUser is kube-proxy's user name at the API server.
const ProxyUser = "system:serviceaccount:" + metav1.NamespaceSystem + ":" + proxy.KubeProxyServiceAccountName

// addProxy makes kubeadm's code write all objects of kube-proxy, as kubeadm init does.
func addProxy(ctx context.Context, p *controlPlane) error {
	c, err := config.DefaultedStaticInitConfiguration()
	if err != nil {
		return err
	}
	c.LocalAPIEndpoint.AdvertiseAddress, c.LocalAPIEndpoint.BindPort = p.node.Addr4.String(), apiPort
	c.Networking.PodSubnet = kubeadm.PodSubnet
	componentconfigs.Default(&c.ClusterConfiguration, &c.LocalAPIEndpoint, &c.NodeRegistration)
	if err := proxy.EnsureProxyAddon(&c.ClusterConfiguration, &c.LocalAPIEndpoint, p.client, io.Discard, false); err != nil {
		return fmt.Errorf("add kube-proxy as kubeadm does: %w", err)
	}
	return nil
}

// proxyConfigMap returns the ConfigMap of kube-proxy.
func proxyConfigMap(ctx context.Context, client kubernetes.Interface) (*v1.ConfigMap, error) {
	return client.CoreV1().ConfigMaps(metav1.NamespaceSystem).Get(ctx, constants.KubeProxyConfigMap, metav1.GetOptions{})
}

// editConfig replaces lines of kube-proxy's configuration, as a user does with an editor. Each
// line must exist.
func editConfig(ctx context.Context, client kubernetes.Interface, edits map[string]string) error {
	m, err := proxyConfigMap(ctx, client)
	if err != nil {
		return err
	}
	lines := strings.Split(m.Data[constants.KubeProxyConfigMapKey], "\n")
	for old, replacement := range edits {
		i := slices.Index(lines, old)
		if i < 0 {
			return fmt.Errorf("kubeadm's configuration has no line %q:\n%s", old, m.Data[constants.KubeProxyConfigMapKey])
		}
		lines[i] = replacement
	}
	m.Data[constants.KubeProxyConfigMapKey] = strings.Join(lines, "\n")
	_, err = client.CoreV1().ConfigMaps(m.Namespace).Update(ctx, m, metav1.UpdateOptions{})
	return err
}

// proxyPod returns the template of kube-proxy's Pods.
func proxyPod(ctx context.Context, client kubernetes.Interface) (*v1.PodSpec, error) {
	d, err := client.AppsV1().DaemonSets(metav1.NamespaceSystem).Get(ctx, constants.KubeProxy, metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	if n := len(d.Spec.Template.Spec.Containers); n != 1 {
		return nil, fmt.Errorf("kubeadm's Pod has %d containers, not one", n)
	}
	return &d.Spec.Template.Spec, nil
}

// volumes returns the files of kube-proxy's Pod that come from the API.
func volumes(ctx context.Context, p *controlPlane) (configuration, token map[string]string, err error) {
	m, err := proxyConfigMap(ctx, p.client)
	if err != nil {
		return nil, nil, err
	}
	request := &authenticationv1.TokenRequest{}
	request, err = p.client.CoreV1().ServiceAccounts(metav1.NamespaceSystem).CreateToken(ctx, proxy.KubeProxyServiceAccountName, request, metav1.CreateOptions{})
	if err != nil {
		return nil, nil, err
	}
	if left := time.Until(request.Status.ExpirationTimestamp.Time); left < 10*time.Minute {
		return nil, nil, errors.New("the token expires during the test")
	}
	return m.Data, map[string]string{"token": request.Status.Token, "ca.crt": string(p.ca.pem()), "namespace": metav1.NamespaceSystem}, nil
}
