// The servers of a Kubernetes cluster in one program, for tests: etcd, the API server, the
// controllers, the scheduler, and kwok for nodes that only say that they run something.
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
	"github.com/spf13/pflag"
	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllermanager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kwokconfig "sigs.k8s.io/kwok/pkg/config"
	kwok "sigs.k8s.io/kwok/pkg/kwok/cmd"
	kwoklog "sigs.k8s.io/kwok/pkg/log"
	kwoksignals "sigs.k8s.io/kwok/pkg/utils/signals"
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
			"kube-scheduler, kwok or signing-key")
	}
	part := os.Args[1]
	os.Args = append([]string{part}, os.Args[2:]...) // each part reads the arguments as if it were alone
	switch part {
	case "etcd":
		etcdmain.Main(os.Args)
	case "kwok":
		os.Exit(runKwok())
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

// runKwok does what kwok's own main does, but for one thing: cobra adds pflag.CommandLine to
// every command, and there the servers of Kubernetes have registered a `version` of their own.
func runKwok() int {
	pflag.CommandLine = pflag.NewFlagSet("kwok", pflag.ExitOnError)
	flags := pflag.NewFlagSet("global", pflag.ContinueOnError)
	flags.ParseErrorsAllowlist.UnknownFlags = true
	flags.Usage = func() {}
	ctx, logger := kwoklog.InitFlags(kwoksignals.SetupSignalContext(), flags)
	ctx, err := kwokconfig.InitFlags(ctx, flags)
	if err == nil {
		command := kwok.NewCommand(ctx)
		command.PersistentFlags().AddFlagSet(flags)
		err = command.ExecuteContext(ctx)
	}
	if err != nil {
		logger.Error("kwok", "err", err)
		return 1
	}
	return 0
}
