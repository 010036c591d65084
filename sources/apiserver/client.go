// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"errors"
	"fmt"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	eventsv1 "k8s.io/api/events/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/client-go/util/flowcontrol"
	"k8s.io/component-base/version"
	"k8s.io/klog/v2"
)

// Defaults of ClientConfig.
const (
	// DefaultQPS and DefaultBurst are kube-proxy's: a proxy opens four
	// watches and then hardly ever speaks, so they only pace reconnects.
	DefaultQPS   = 5
	DefaultBurst = 10

	// defaultAccept lets a server (or an aggregating front) that has no
	// protobuf answer in JSON instead of 406.
	defaultAccept = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON
)

// ClientConfig says how to reach the API server. The zero value is a pod's own
// service account with kube-proxy's rates, speaking protobuf.
type ClientConfig struct {
	// Kubeconfig is the path of a kubeconfig file.
	Kubeconfig string
	// Master is the URL of the API server and wins over the kubeconfig's. When
	// both are empty the client uses the pod's service account.
	Master string
	// ContentType of requests; protobuf when empty.
	ContentType string
	// AcceptContentTypes of answers, comma separated, best first; protobuf and
	// then JSON when empty.
	AcceptContentTypes string
	// QPS and Burst pace requests; DefaultQPS and DefaultBurst when zero. A
	// negative QPS lifts the limit, as it does in client-go.
	QPS   float32
	Burst int
}

// Client speaks of the few kinds that a proxy has to do with. client-go's clientset would do the
// same requests, and compile and link the types of all of Kubernetes with it.
type Client struct {
	core, discovery, networking, events rest.Interface
}

// scheme has the kinds that requests and answers are made of.
var (
	scheme         = newScheme()
	codecs         = serializer.NewCodecFactory(scheme)
	parameterCodec = runtime.NewParameterCodec(scheme)
)

func newScheme() *runtime.Scheme {
	s := runtime.NewScheme()
	metav1.AddToGroupVersion(s, schema.GroupVersion{Version: "v1"})
	for _, add := range []func(*runtime.Scheme) error{v1.AddToScheme, discoveryv1.AddToScheme, networkingv1.AddToScheme, eventsv1.AddToScheme} {
		utilruntime.Must(add(s))
	}
	return s
}

// NewClient builds a client. It does not connect.
func NewClient(cfg ClientConfig) (*Client, error) {
	restConfig, err := restConfigFor(cfg)
	if err != nil {
		return nil, err
	}
	client, err := clientFor(restConfig)
	if err != nil {
		return nil, fmt.Errorf("create API client: %w", err)
	}
	return client, nil
}

// clientFor shares connections and the pace of requests between the groups, as a clientset does.
func clientFor(restConfig *rest.Config) (*Client, error) {
	transport, err := rest.HTTPClientFor(restConfig)
	if err != nil {
		return nil, err
	}
	shared := rest.CopyConfig(restConfig)
	if shared.QPS > 0 {
		if shared.Burst <= 0 {
			return nil, errors.New("burst is required to be greater than 0 when QPS is set to greater than 0")
		}
		shared.RateLimiter = flowcontrol.NewTokenBucketRateLimiter(shared.QPS, shared.Burst)
	}
	shared.NegotiatedSerializer = rest.CodecFactoryForGeneratedClient(scheme, codecs).WithoutConversion()
	c := &Client{}
	for _, group := range []struct {
		path    string
		version schema.GroupVersion
		client  *rest.Interface
	}{
		{"/api", v1.SchemeGroupVersion, &c.core},
		{"/apis", discoveryv1.SchemeGroupVersion, &c.discovery},
		{"/apis", networkingv1.SchemeGroupVersion, &c.networking},
		{"/apis", eventsv1.SchemeGroupVersion, &c.events},
	} {
		of := rest.CopyConfig(shared)
		of.APIPath, of.GroupVersion = group.path, &group.version
		if *group.client, err = rest.RESTClientForConfigAndClient(of, transport); err != nil {
			return nil, err
		}
	}
	return c, nil
}

// Services are those of all namespaces.
func (c *Client) Services() Resource {
	return Resource{c.core, "services", func() runtime.Object { return &v1.ServiceList{} }}
}

// Nodes are those of the cluster.
func (c *Client) Nodes() Resource {
	return Resource{c.core, "nodes", func() runtime.Object { return &v1.NodeList{} }}
}

// EndpointSlices are those of all namespaces.
func (c *Client) EndpointSlices() Resource {
	return Resource{c.discovery, "endpointslices", func() runtime.Object { return &discoveryv1.EndpointSliceList{} }}
}

// ServiceCIDRs are the ranges that the API server takes the addresses of Services from.
func (c *Client) ServiceCIDRs() Resource {
	return Resource{c.networking, "servicecidrs", func() runtime.Object { return &networkingv1.ServiceCIDRList{} }}
}

// Events writes Events.
func (c *Client) Events() Events { return Events{c.events} }

func restConfigFor(cfg ClientConfig) (*rest.Config, error) {
	var restConfig *rest.Config
	var err error
	if cfg.Kubeconfig == "" && cfg.Master == "" {
		// Its address is that of a Service, which this process is to make work.
		klog.Background().Info("Neither a kubeconfig nor a master URL is set; reaching the API server by its Service address, which may not work on a new node")
		if restConfig, err = rest.InClusterConfig(); err != nil {
			return nil, fmt.Errorf("load in-cluster client config (neither a kubeconfig nor a master URL is set): %w", err)
		}
	} else {
		// An explicit path instead of the default loading rules: a proxy must
		// not pick up $KUBECONFIG or a home directory by accident.
		restConfig, err = clientcmd.NewNonInteractiveDeferredLoadingClientConfig(
			&clientcmd.ClientConfigLoadingRules{ExplicitPath: cfg.Kubeconfig},
			&clientcmd.ConfigOverrides{ClusterInfo: clientcmdapi.Cluster{Server: cfg.Master}},
		).ClientConfig()
		if err != nil {
			return nil, fmt.Errorf("load client config from kubeconfig %q: %w", cfg.Kubeconfig, err)
		}
	}

	restConfig.ContentType = cfg.ContentType
	if restConfig.ContentType == "" {
		restConfig.ContentType = runtime.ContentTypeProtobuf
	}
	restConfig.AcceptContentTypes = cfg.AcceptContentTypes
	if restConfig.AcceptContentTypes == "" {
		restConfig.AcceptContentTypes = defaultAccept
	}
	restConfig.QPS = cfg.QPS
	if restConfig.QPS == 0 {
		restConfig.QPS = DefaultQPS
	}
	restConfig.Burst = cfg.Burst
	if restConfig.Burst == 0 {
		restConfig.Burst = DefaultBurst
	}
	// Starts like upstream's, so that audit and API priority rules that match
	// on the agent's name keep matching.
	restConfig.UserAgent = fmt.Sprintf("kube-proxy/%s tandem", version.Get().GitVersion)
	return restConfig, nil
}
