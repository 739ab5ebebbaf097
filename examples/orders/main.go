// Orders runs the example: MongoDB, Kafka, two relays, and two instances each of the order service, the payment program
// and the projector, as processes of their own. It places orders over HTTP, kills one process of each kind with -9 on the
// way, and when everything has come to rest compares what must be equal.
//
//	go run ./examples/orders [-orders N] [-kill=false] [-json]
//
// It exits with 0 only if each order was placed, paid or cancelled, charged and counted exactly once, in order. Whatever it
// has started is stopped again.
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
	orders := flag.Int("orders", 300, "how many orders are placed")
	kill := flag.Bool("kill", true, "kill one process of each kind on the way")
	asJSON := flag.Bool("json", false, "print the account as one JSON object")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, *orders, *kill, *asJSON); err != nil {
		fmt.Fprintln(os.Stderr, "orders:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, orders int, kill, asJSON bool) error {
	e, err := start(ctx, os.Stderr)
	if err != nil {
		return err
	}
	defer e.stop()
	began := time.Now()
	check, err := newCheck(ctx, e.servers.MongoURI(), e.database)
	if err != nil {
		return err
	}
	defer check.close(ctx)
	c := client{urls: e.urls}
	for i := range orders {
		if kill && i == orders/3 {
			if err := e.killOneOfEach(); err != nil {
				return err
			}
		}
		if err := c.place(ctx, order{ID: fmt.Sprintf("o-%04d", i), Customer: fmt.Sprintf("c-%d", i%7), Cents: int64(1000 + i%10*1000)}); err != nil {
			return err
		}
	}
	e.say("%d orders placed in %s; waiting until all are settled and counted", orders, time.Since(began).Round(time.Millisecond))
	account, err := check.wait(ctx, orders)
	if err != nil {
		return errors.Join(err, e.words())
	}
	account.Seconds = time.Since(began).Seconds()
	if asJSON {
		return json.NewEncoder(os.Stdout).Encode(account)
	}
	_, err = fmt.Fprintln(os.Stdout, account)
	return err
}

// example is what runs.
type example struct {
	servers  *servers.Servers
	out      io.Writer
	env      []string
	database string
	urls     []string // of the order services
	programs []*servers.Program
}

// start brings everything up. SHOP_DATABASE and SHOP_TOPICS name the example's own, for servers that others use too.
func start(ctx context.Context, out io.Writer) (*example, error) {
	s, err := servers.Start(ctx, out)
	if err != nil {
		return nil, err
	}
	e := &example{servers: s, out: out, database: cmp.Or(os.Getenv("SHOP_DATABASE"), "shop")}
	topics := cmp.Or(os.Getenv("SHOP_TOPICS"), "outbox.event.")
	own := func(v string) bool { return strings.HasPrefix(v, "OUTRELAY_") } // what is set for others
	e.env = append(slices.DeleteFunc(os.Environ(), own),
		"MONGODB_URI="+s.MongoURI(), "KAFKA_BROKERS="+strings.Join(s.Brokers(), ","), "SHOP_DATABASE="+e.database, "SHOP_TOPICS="+topics,
		"OUTRELAY_MONGODB_URI="+s.MongoURI(), "OUTRELAY_MONGODB_STATE="+e.database+"_relay", "OUTRELAY_KAFKA_BROKERS="+strings.Join(s.Brokers(), ","),
		"OUTRELAY_WATCH="+e.database+".outbox", "OUTRELAY_WATCHER="+e.database, "OUTRELAY_HTTP_LISTEN=off",
		"OUTRELAY_LEASE_TTL=2s", "OUTRELAY_LEASE_RENEW=400ms", // a killed relay is replaced sooner than by default
		"OUTRELAY_TOPICS_TEMPLATE="+topics+"{aggregatetype}", "OUTRELAY_TOPICS_CREATE={partitions: 4, replication: 1}",
		`OUTRELAY_RECORD_HEADERS={type: "{type}"}`, // by which consumers know what an event is
	)
	if err := e.build(ctx); err != nil {
		s.Stop()
		return nil, err
	}
	for i := range 2 {
		url, err := e.startAll(ctx, i)
		if err != nil {
			e.stop()
			return nil, err
		}
		e.urls = append(e.urls, url)
	}
	return e, nil
}

// build makes the programs; `go run` has put the go command in our way.
func (e *example) build(ctx context.Context) error {
	began := time.Now()
	cmd := exec.CommandContext(ctx, "go", "build", "-o", e.servers.Dir()+string(filepath.Separator),
		module+"/cmd/outrelay", module+"/examples/orders/service", module+"/examples/orders/payment", module+"/examples/orders/projector")
	if words, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("building the programs: %w\n%s", err, words)
	}
	e.say("four programs built in %s", time.Since(began).Round(time.Millisecond))
	return nil
}

// startAll starts one instance of each program.
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
		p, err := e.servers.Run(fmt.Sprintf("%s-%d", name, i+1), slices.Concat(e.env, []string{"SHOP_LISTEN=" + addr}), filepath.Join(e.servers.Dir(), name), args...)
		if err != nil {
			return "", err
		}
		e.programs = append(e.programs, p)
		e.say("%-12s pid %d", p.Name(), p.PID())
	}
	return "http://" + addr, nil
}

// killOneOfEach ends the first instances as a power cut would: the second ones take over what they leave.
func (e *example) killOneOfEach() error {
	for _, p := range e.programs {
		if !strings.HasSuffix(p.Name(), "-1") {
			continue
		}
		if err := p.Kill(); err != nil {
			return err
		}
		e.say("%-12s killed with -9", p.Name())
	}
	return nil
}

// stop lets the programs finish what they are at, and ends them and the servers.
func (e *example) stop() {
	for _, p := range e.programs {
		_ = p.Terminate() // one that does not end is killed below
	}
	late, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	for _, p := range e.programs {
		select {
		case <-p.Done():
		case <-late.Done():
			_ = p.Kill()
		}
	}
	e.servers.Stop()
}

// words are the last lines of all programs, to see what went wrong.
func (e *example) words() error {
	var errs []error
	for _, p := range e.programs {
		if lines := p.LastLines(5); len(lines) > 0 {
			errs = append(errs, fmt.Errorf("%s:\n  %s", p.Name(), strings.Join(lines, "\n  ")))
		}
	}
	return errors.Join(errs...)
}

func (e *example) say(format string, args ...any) { fmt.Fprintf(e.out, format+"\n", args...) }
