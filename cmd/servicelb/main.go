// SPDX-License-Identifier: Apache-2.0

// Servicelb gives Services of type LoadBalancer the addresses of the cluster's nodes. One process of it is enough; others wait for its Lease.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"runtime/debug"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	"k8s.io/client-go/tools/record"
	"k8s.io/component-base/cli"
	"k8s.io/component-base/version/verflag"
	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/servicelb"
	"github.com/tandem-proxy/tandem/servicelb/controller"
)

// options are the flags.
type options struct {
	controller.Options
	kubeconfig, master string
	namespace, name    string
	cleanup            bool
}

func main() { os.Exit(cli.Run(newCommand())) }

func newCommand() *cobra.Command {
	o := &options{Options: controller.Options{HealthPort: 10256, Options: servicelb.Options{Listeners: servicelb.ListenersRefuse}}}
	c := &cobra.Command{
		Use:   "servicelb",
		Short: "Give Services of type LoadBalancer the addresses of nodes",
		Long: "servicelb writes the addresses of nodes into the status of Services of type LoadBalancer with loadBalancerClass tandem-proxy.dev/servicelb.\n" +
			"The kube-proxy of each node serves them. It needs no pods on nodes, as the ServiceLB of K3s (klipper-lb) does.",
		Args: cobra.NoArgs, SilenceUsage: true,
		RunE: func(c *cobra.Command, _ []string) error {
			verflag.PrintAndExitIfRequested()
			ctx, stop := signal.NotifyContext(c.Context(), os.Interrupt, syscall.SIGTERM)
			defer stop()
			return o.run(ctx)
		},
	}
	fs := c.Flags()
	fs.StringVar(&o.kubeconfig, "kubeconfig", "", "Path of a kubeconfig. Without it, and without --master, the pod's service account is used.")
	fs.StringVar(&o.master, "master", "", "URL of the API server. Takes precedence over the kubeconfig.")
	fs.BoolVar(&o.DefaultClass, "default-class", false, "Also serve Services without a loadBalancerClass. Turn other controllers that do so off first: with K3s, --disable=servicelb.")
	fs.BoolVar(&o.EachNode, "addresses-per-node", false, "Use the ExternalIPs of each node that has any, and the InternalIPs of each that has none. Otherwise InternalIPs are used only if no node has an ExternalIP, as K3s does.")
	fs.Uint16Var(&o.HealthPort, "health-port", o.HealthPort, "Port at which the kube-proxy of a node answers /healthz. A node that does not answer three times is withdrawn, within 6 s. 0 uses all nodes that are Ready.")
	fs.Var((*policyVar)(&o.Listeners), "host-listeners", "What happens if a process of the host listens at a port of an address that a Service is to get: 'refuse' leaves the address to the process, 'warn' gives it to the Service with an Event, 'shadow' does so without asking. Annotation servicelb.tandem-proxy.dev/host-listeners of a Service takes precedence.")
	fs.StringSliceVar(&o.Forbidden, "forbid-annotations", nil, "Annotations that owners of Services may not use: of "+strings.Join(servicelb.Annotations(), ", ")+". They are ignored, and an Event says so.")
	fs.BoolVar(&o.Rootless, "rootless", false, "Write 127.0.0.1 into the status of Services in place of the nodes' addresses, as K3s does where a user without privileges runs the node.")
	fs.BoolVar(&o.DeleteKlipper, "delete-klipper-lb", false, "Delete the DaemonSet of klipper-lb (svclb-...) of each Service once the nodes serve the Service. Turn K3s' controller off first: with K3s, --disable=servicelb.")
	fs.BoolVar(&o.cleanup, "cleanup", false, "Take the conditions of ServiceLB off all Services, leave their addresses, and exit. For another controller that takes over.")
	fs.StringVar(&o.namespace, "lease-namespace", "kube-system", "Namespace of the Lease.")
	fs.StringVar(&o.name, "lease-name", "tandem-servicelb", "Name of the Lease.")
	verflag.AddFlags(fs)
	return c
}

// policyVar is a flag.
type policyVar servicelb.ListenerPolicy

func (v *policyVar) String() string { return string(*v) }
func (v *policyVar) Type() string   { return "policy" }

func (v *policyVar) Set(text string) error {
	p, err := servicelb.ParseListenerPolicy(text)
	if err == nil {
		*v = policyVar(p)
	}
	return err
}

// gcPercent has the heap grow by half between collections: with 1,000 Services on 50 nodes, that saves 20 MiB for little time.
const gcPercent = 50

// errLost ends the process: another one holds the Lease, and it starts anew as one that waits.
var errLost = errors.New("the Lease was lost")

func (o *options) clientConfig() (*rest.Config, error) {
	if o.kubeconfig == "" && o.master == "" {
		return rest.InClusterConfig() // without a warning, as this is the usual way
	}
	return clientcmd.BuildConfigFromFlags(o.master, o.kubeconfig)
}

func (o *options) run(ctx context.Context) error {
	if i := slices.IndexFunc(o.Forbidden, func(a string) bool { return !slices.Contains(servicelb.Annotations(), a) }); i >= 0 {
		return fmt.Errorf("--forbid-annotations: %.64q is none of %s", o.Forbidden[i], strings.Join(servicelb.Annotations(), ", "))
	}
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(gcPercent)
	}
	config, err := o.clientConfig()
	if err != nil {
		return fmt.Errorf("find the API server: %w", err)
	}
	config.UserAgent, config.QPS, config.Burst = "tandem-servicelb", 400, 400
	config.ContentType, config.AcceptContentTypes = "application/vnd.kubernetes.protobuf", "application/vnd.kubernetes.protobuf,application/json"
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	if o.cleanup {
		n, err := controller.ForgetAll(ctx, client)
		klog.FromContext(ctx).Info("Removed the conditions of ServiceLB", "services", n)
		return err
	}
	broadcaster := record.NewBroadcaster(record.WithContext(ctx))
	defer broadcaster.Shutdown()
	// Many Events must not delay the status of Services.
	slow := rest.CopyConfig(config)
	slow.QPS, slow.Burst = 5, 25
	events, err := corev1client.NewForConfig(slow)
	if err != nil {
		return err
	}
	broadcaster.StartRecordingToSink(&corev1client.EventSinkImpl{Interface: events.Events("")})
	recorder := broadcaster.NewRecorder(scheme.Scheme, v1.EventSource{Component: "tandem-servicelb"})

	host, err := os.Hostname()
	if err != nil {
		return err
	}
	identity := host + "_" + string(uuid.NewUUID())
	lock, err := resourcelock.New(resourcelock.LeasesResourceLock, o.namespace, o.name, client.CoreV1(), client.CoordinationV1(), resourcelock.ResourceLockConfig{Identity: identity})
	if err != nil {
		return err
	}
	var failed error
	working := make(chan struct{}, 1) // held while the status of Services may be written
	elector, err := leaderelection.NewLeaderElector(leaderelection.LeaderElectionConfig{
		Lock: lock, LeaseDuration: 15 * time.Second, RenewDeadline: 10 * time.Second, RetryPeriod: 2 * time.Second, Name: o.name,
		Callbacks: leaderelection.LeaderCallbacks{
			OnStartedLeading: func(ctx context.Context) {
				working <- struct{}{}
				defer func() { <-working }()
				failed = controller.New(client, recorder, o.Options).Run(ctx)
			},
			OnStoppedLeading: func() {},
			OnNewLeader: func(id string) {
				if id != identity {
					klog.FromContext(ctx).Info("Another process assigns addresses; waiting for its Lease", "holder", id)
				}
			},
		},
	})
	if err != nil {
		return err
	}
	elector.Run(ctx)
	working <- struct{}{} // what is under way ends before another process may begin
	if ctx.Err() == nil {
		return errors.Join(errLost, failed)
	}
	return release(lock, identity)
}

// release gives the Lease back, so that another process need not wait until it runs out.
func release(lock resourcelock.Interface, identity string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	held, _, err := lock.Get(ctx)
	if err != nil || held.HolderIdentity != identity {
		return nil // it runs out
	}
	held.HolderIdentity, held.LeaseDurationSeconds = "", 1
	return lock.Update(ctx, *held)
}
