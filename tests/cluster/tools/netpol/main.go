// Command netpol enforces the NetworkPolicies of a test cluster on one node: kube-network-policies,
// which judges the first packet of each connection that the kernel hands it.
//
// The stock program reads its kubeconfig from inside a pod only, and steers packets to its queue by
// nftables alone, which not every kernel can. This one is told where the API server is, and whoever
// starts it adds rules of iptables that lead to the same queue.
package main

import (
	"context"
	"flag"
	"log"
	"os/signal"
	"syscall"

	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/kube-network-policies/pkg/networkpolicy"
)

func main() {
	kubeconfig := flag.String("kubeconfig", "", "how to reach the API server")
	node := flag.String("node", "", "name of the node whose pods are guarded")
	queue := flag.Int("queue", 100, "number of the kernel's queue of packets")
	flag.Parse()
	if err := run(*kubeconfig, *node, *queue); err != nil {
		log.Fatal(err)
	}
}

func run(kubeconfig, node string, queue int) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	access, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return err
	}
	client, err := kubernetes.NewForConfig(access)
	if err != nil {
		return err
	}
	found := informers.NewSharedInformerFactory(client, 0)
	controller, err := networkpolicy.NewController(
		client,
		found.Networking().V1().NetworkPolicies(),
		found.Core().V1().Namespaces(),
		found.Core().V1().Pods(),
		nil, nil, nil, nil,
		networkpolicy.Config{NodeName: node, QueueID: queue},
	)
	if err != nil {
		return err
	}
	found.Start(ctx.Done())
	return controller.Run(ctx)
}
