// Orders runs the example: MongoDB, Kafka, two relays, and two instances each of the order service,
// the payment program and the projector. Each instance is a process. Orders places orders over HTTP
// and kills one process of each kind with signal 9 on the way. When all orders are settled, it
// compares the results.
//
//	go run ./examples/orders [-orders N] [-kill=false] [-json]
//
// The exit code is 0 only if each order was placed, paid or canceled, charged and counted exactly
// once and in order. All processes that it has started are stopped in the end.
package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/outrelay/outrelay/examples/orders/servers"
)

const module = "github.com/outrelay/outrelay"

func main() {
	orders := flag.Int("orders", 300, "number of orders to place")
	kill := flag.Bool("kill", true, "kill one process of each kind on the way")
	asJSON := flag.Bool("json", false, "print the results as one JSON object")
	flag.Parse()

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()

	if err := runExample(ctx, *orders, *kill, *asJSON); err != nil {
		fmt.Fprintln(os.Stderr, "orders:", err)
		os.Exit(1)
	}
}

// runExample places the orders and prints the results.
func runExample(ctx context.Context, orders int, kill, asJSON bool) error {
	e, err := startExample(ctx, os.Stderr)
	if err != nil {
		return err
	}
	defer e.stopAll()

	began := time.Now()
	check, err := newCheck(ctx, e.servers.MongoURI(), e.database)
	if err != nil {
		return err
	}

	defer check.disconnect(ctx)

	c := client{urls: e.urls}
	for i := range orders {
		if kill && i == orders/3 {
			if err := e.killOneOfEach(); err != nil {
				return err
			}
		}

		o := order{
			ID:       fmt.Sprintf("o-%04d", i),
			Customer: fmt.Sprintf("c-%d", i%7),
			Cents:    int64(1000 + i%10*1000),
		}
		if err := c.placeOrder(ctx, o); err != nil {
			return err
		}
	}

	e.printLine("%d orders placed in %s; waiting until all are settled and counted",
		orders, time.Since(began).Round(time.Millisecond))
	account, err := check.waitUntilSettled(ctx, orders)
	if err != nil {
		return errors.Join(err, e.lastLines())
	}

	account.Seconds = time.Since(began).Seconds()
	if asJSON {
		return json.NewEncoder(os.Stdout).Encode(account)
	}

	_, err = fmt.Fprintln(os.Stdout, account)
	return err
}

// example contains the running servers and programs.
type example struct {
	servers  *servers.Servers
	out      io.Writer
	env      []string // of the programs
	database string
	urls     []string // of the order services
	programs []*servers.Program
}

// startExample starts the servers and the programs. If other programs use the servers too,
// SHOP_DATABASE and SHOP_TOPICS set separate names for the example.
func startExample(ctx context.Context, out io.Writer) (*example, error) {
	s, err := servers.Start(ctx, out)
	if err != nil {
		return nil, err
	}

	e := &example{servers: s, out: out, database: cmp.Or(os.Getenv("SHOP_DATABASE"), "shop")}
	topics := cmp.Or(os.Getenv("SHOP_TOPICS"), "outbox.event.")
	brokers := strings.Join(s.Brokers(), ",")

	// Variables for other relays must not change this one.
	isRelayVariable := func(v string) bool { return strings.HasPrefix(v, "OUTRELAY_") }
	e.env = append(slices.DeleteFunc(os.Environ(), isRelayVariable),
		"MONGODB_URI="+s.MongoURI(),
		"KAFKA_BROKERS="+brokers,
		"SHOP_DATABASE="+e.database,
		"SHOP_TOPICS="+topics,
		"OUTRELAY_MONGODB_URI="+s.MongoURI(),
		"OUTRELAY_STATE_DATABASE="+e.database+"_relay",
		"OUTRELAY_KAFKA_BROKERS="+brokers,
		"OUTRELAY_WATCH="+e.database+".outbox",
		"OUTRELAY_WATCHER="+e.database,
		"OUTRELAY_HTTP_LISTEN=off",

		// With a shorter lease than by default, a killed relay is replaced sooner.
		"OUTRELAY_LEASE_TTL=2s",
		"OUTRELAY_LEASE_RENEW=400ms",

		"OUTRELAY_TOPICS_TEMPLATE="+topics+"{aggregatetype}",
		"OUTRELAY_TOPICS_CREATE={partitions: 4, replication: 1}",
	)

	if err := e.buildPrograms(ctx); err != nil {
		s.Stop()
		return nil, err
	}

	for i := range 2 {
		url, err := e.startAll(ctx, i)
		if err != nil {
			e.stopAll()
			return nil, err
		}

		e.urls = append(e.urls, url)
	}

	return e, nil
}

// buildPrograms builds the programs. The go command is in the path, because `go run` has started
// this program.
func (e *example) buildPrograms(ctx context.Context) error {
	began := time.Now()
	cmd := exec.CommandContext(ctx, "go", "build", "-o", e.servers.Dir()+string(filepath.Separator),
		module+"/cmd/outrelay",
		module+"/examples/orders/service",
		module+"/examples/orders/payment",
		module+"/examples/orders/projector")
	if output, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("building the programs: %w\n%s", err, output)
	}

	e.printLine("four programs built in %s", time.Since(began).Round(time.Millisecond))
	return nil
}

// startAll starts instance i of each program and returns the URL of its order service.
func (e *example) startAll(ctx context.Context, i int) (url string, err error) {
	addr, err := freeAddress(ctx)
	if err != nil {
		return "", err
	}

	for _, name := range []string{"outrelay", "service", "payment", "projector"} {
		args := []string{}
		if name == "outrelay" {
			args = []string{"run"}
		}

		path := filepath.Join(e.servers.Dir(), name)
		env := slices.Concat(e.env, []string{"SHOP_LISTEN=" + addr})
		p, err := e.servers.Run(fmt.Sprintf("%s-%d", name, i+1), env, path, args...)
		if err != nil {
			return "", err
		}

		e.programs = append(e.programs, p)
		e.printLine("%-12s pid %d", p.Name(), p.PID())
	}

	return "http://" + addr, nil
}

// killOneOfEach kills the first instance of each program. The second instance takes over its work.
func (e *example) killOneOfEach() error {
	for _, p := range e.programs {
		if !strings.HasSuffix(p.Name(), "-1") {
			continue
		}
		if err := p.Kill(); err != nil {
			return err
		}

		e.printLine("%-12s killed with -9", p.Name())
	}

	return nil
}

// stopAll terminates the programs, kills those that do not end within 20 s, and stops the servers.
func (e *example) stopAll() {
	for _, p := range e.programs {
		// A program that does not end is killed below.
		_ = p.Terminate()
	}

	deadline, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()

	for _, p := range e.programs {
		select {
		case <-p.Done():
		case <-deadline.Done():
			// An error means that the program has ended in the meantime.
			_ = p.Kill()
		}
	}

	e.servers.Stop()
}

// lastLines returns the last lines of all programs as an error.
func (e *example) lastLines() error {
	var errs []error
	for _, p := range e.programs {
		if lines := p.LastLines(5); len(lines) > 0 {
			errs = append(errs, fmt.Errorf("%s:\n  %s", p.Name(), strings.Join(lines, "\n  ")))
		}
	}
	return errors.Join(errs...)
}

// printLine prints one line of progress.
func (e *example) printLine(format string, args ...any) { fmt.Fprintf(e.out, format+"\n", args...) }
