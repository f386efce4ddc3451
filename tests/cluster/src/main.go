// The servers of a Kubernetes cluster in one program, for tests: etcd, the API server, the
// controllers and the scheduler.
// The first argument names the part; `signing-key` writes a key for the tokens of service accounts.
package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"os"
	_ "time/tzdata"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllermanager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
)

// commands of Kubernetes' own servers, which are alike.
var commands = map[string]func() *cobra.Command{
	"kube-apiserver":          func() *cobra.Command { return apiserver.NewAPIServerCommand() },
	"kube-controller-manager": func() *cobra.Command { return controllermanager.NewControllerManagerCommand() },
	"kube-scheduler":          func() *cobra.Command { return scheduler.NewSchedulerCommand() },
}

func main() {
	if len(os.Args) < 2 {
		fail("a part must be named, got none; give etcd, kube-apiserver, kube-controller-manager, " +
			"kube-scheduler or signing-key")
	}
	part := os.Args[1]
	os.Args = append([]string{part}, os.Args[2:]...) // each part reads the arguments as if it were alone
	switch part {
	case "etcd":
		etcdmain.Main(os.Args)
	case "signing-key":
		writeSigningKey()
	default:
		command, known := commands[part]
		if !known {
			fail(fmt.Sprintf("part must be known, got %q", part))
		}
		os.Exit(cli.Run(command()))
	}
}

func fail(message string) {
	fmt.Fprintln(os.Stderr, message)
	os.Exit(2)
}

// writeSigningKey prints a new key, so that nobody needs openssl for one.
func writeSigningKey() {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		fail(err.Error())
	}
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		fail(err.Error())
	}
	if err := pem.Encode(os.Stdout, &pem.Block{Type: "EC PRIVATE KEY", Bytes: der}); err != nil {
		fail(err.Error())
	}
}
