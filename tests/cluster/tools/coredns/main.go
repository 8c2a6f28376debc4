// Command coredns is the DNS server of a test cluster: CoreDNS with the plugins a Corefile of
// this testbed names. The stock program brings the client libraries of every cloud along, which
// would be most of its build.
package main

import (
	"github.com/coredns/coredns/coremain"
	_ "github.com/coredns/coredns/plugin/bind"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/kubernetes"
	_ "github.com/coredns/coredns/plugin/ready"
)

func main() { coremain.Run() }
