// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"cmp"
	"errors"
	"fmt"
	"net/http"
	"time"

	authorizationv1 "k8s.io/api/authorization/v1"
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
)

// Defaults of ClientConfig.
const (
	// DefaultQPS and DefaultBurst are kube-proxy's. A proxy opens at most six watches
	// and sends few other requests, so they only limit reconnects.
	DefaultQPS   = 5
	DefaultBurst = 10

	// eventBurst is how many Events are written at once, if Burst is less: those of a start, or of many objects with a problem, come
	// together. Afterwards, QPS limits them as well.
	eventBurst = 50

	// defaultAccept lets a server or aggregator without protobuf answer in JSON
	// instead of 406.
	defaultAccept = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON
)

// ClientConfig says how to reach the API server. The zero value uses the pod's service account,
// kube-proxy's rates and protobuf.
type ClientConfig struct {
	// Kubeconfig is the path of a kubeconfig file.
	Kubeconfig string
	// Master is the URL of the API server and overrides that of the kubeconfig. If both
	// are empty, the client uses the pod's service account.
	Master string
	// ContentType of requests; protobuf when empty.
	ContentType string
	// AcceptContentTypes of answers, comma separated, best first; protobuf and
	// then JSON when empty.
	AcceptContentTypes string
	// QPS and Burst limit the rate of requests, and apart from them of Events, whose burst is
	// at least eventBurst; DefaultQPS and DefaultBurst when zero. As in client-go, a negative
	// QPS means no limit.
	QPS   float32
	Burst int
}

// Client requests the few kinds of objects that a proxy uses. client-go's clientset makes the same
// requests, but needs the types of all API groups, which take time to compile and memory.
type Client struct {
	core, discovery, networking, events, authorization rest.Interface

	inCluster bool // it uses the pod's service account
	contact   *contact
}

// scheme has the kinds of requests and answers.
var (
	scheme         = newScheme()
	codecs         = serializer.NewCodecFactory(scheme)
	parameterCodec = runtime.NewParameterCodec(scheme)
)

func newScheme() *runtime.Scheme {
	s := runtime.NewScheme()
	metav1.AddToGroupVersion(s, schema.GroupVersion{Version: "v1"})
	for _, add := range []func(*runtime.Scheme) error{v1.AddToScheme, discoveryv1.AddToScheme, networkingv1.AddToScheme, eventsv1.AddToScheme, authorizationv1.AddToScheme} {
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
	client.inCluster = cfg.inCluster()
	return client, nil
}

// URL is that of the API server.
func (c *Client) URL() string {
	u := c.core.Get().URL()
	return u.Scheme + "://" + u.Host
}

// clientFor shares connections and the rate limit between the API groups, as a clientset does. Events have a limit of their own: many of
// them do not hold up lists, nor lists them.
func clientFor(restConfig *rest.Config) (*Client, error) {
	transport, err := rest.HTTPClientFor(restConfig)
	if err != nil {
		return nil, err
	}
	own := *transport // without options, it is the one of all packages
	heard := &contact{next: cmp.Or(own.Transport, http.DefaultTransport), last: map[string]time.Time{}}
	own.Transport = heard
	shared := rest.CopyConfig(restConfig)
	if shared.QPS > 0 {
		if shared.Burst <= 0 {
			return nil, errors.New("burst is required to be greater than 0 when QPS is set to greater than 0")
		}
		shared.RateLimiter = flowcontrol.NewTokenBucketRateLimiter(shared.QPS, shared.Burst)
	}
	shared.NegotiatedSerializer = rest.CodecFactoryForGeneratedClient(scheme, codecs).WithoutConversion()
	c := &Client{contact: heard}
	for _, group := range []struct {
		path    string
		version schema.GroupVersion
		client  *rest.Interface
	}{
		{"/api", v1.SchemeGroupVersion, &c.core},
		{"/apis", discoveryv1.SchemeGroupVersion, &c.discovery},
		{"/apis", networkingv1.SchemeGroupVersion, &c.networking},
		{"/apis", eventsv1.SchemeGroupVersion, &c.events},
		{"/apis", authorizationv1.SchemeGroupVersion, &c.authorization},
	} {
		of := rest.CopyConfig(shared)
		of.APIPath, of.GroupVersion = group.path, &group.version
		if group.client == &c.events && shared.RateLimiter != nil {
			of.RateLimiter = flowcontrol.NewTokenBucketRateLimiter(shared.QPS, max(shared.Burst, eventBurst))
		}
		if *group.client, err = rest.RESTClientForConfigAndClient(of, &own); err != nil {
			return nil, err
		}
	}
	return c, nil
}

// Services returns the Services of all namespaces.
func (c *Client) Services() Resource {
	return Resource{c.core, "services", func() runtime.Object { return &v1.ServiceList{} }}
}

// Pods returns the Pods of all namespaces.
func (c *Client) Pods() Resource {
	return Resource{c.core, "pods", func() runtime.Object { return &v1.PodList{} }}
}

// Namespaces returns the Namespaces of the cluster.
func (c *Client) Namespaces() Resource {
	return Resource{c.core, "namespaces", func() runtime.Object { return &v1.NamespaceList{} }}
}

// Nodes returns the Nodes of the cluster.
func (c *Client) Nodes() Resource {
	return Resource{c.core, "nodes", func() runtime.Object { return &v1.NodeList{} }}
}

// EndpointSlices returns the EndpointSlices of all namespaces.
func (c *Client) EndpointSlices() Resource {
	return Resource{c.discovery, "endpointslices", func() runtime.Object { return &discoveryv1.EndpointSliceList{} }}
}

// ServiceCIDRs returns the ServiceCIDRs, from which the API server allocates ClusterIPs.
func (c *Client) ServiceCIDRs() Resource {
	return Resource{c.networking, "servicecidrs", func() runtime.Object { return &networkingv1.ServiceCIDRList{} }}
}

// Events returns a writer of Events.
func (c *Client) Events() Events { return Events{c.events} }

func (cfg *ClientConfig) inCluster() bool { return cfg.Kubeconfig == "" && cfg.Master == "" }

func restConfigFor(cfg ClientConfig) (*rest.Config, error) {
	var restConfig *rest.Config
	var err error
	if cfg.inCluster() {
		if restConfig, err = rest.InClusterConfig(); err != nil {
			return nil, fmt.Errorf("load in-cluster client config (neither a kubeconfig nor a master URL is set): %w", err)
		}
	} else {
		// Use only the given path: the default loading rules would also read
		// $KUBECONFIG and the home directory.
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
	// It starts like upstream's, so that audit and API priority rules for kube-proxy
	// match.
	restConfig.UserAgent = fmt.Sprintf("kube-proxy/%s tandem", version.Get().GitVersion)
	return restConfig, nil
}
