package devstack

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
)

// startWithin bounds a start once the programs are there.
const startWithin = 2 * time.Minute

// A Stack is a running replica set, Kafka cluster or both. Its members' addresses never change.
type Stack struct {
	dir     string
	uri     string // only where the environment named it
	root    User
	mongods []*Member
	brokers []*Member
	tls     *authority
	facts   struct{ mongo, kafka Server }

	guard   *guard
	release func()
	stop    sync.Once
}

// Server says what runs, for people.
type Server struct {
	Name      string // "mongod" or "Kafka"
	Version   string // may be empty for a broker that the environment named
	Addrs     []string
	Origin    string        // "cached", "fetched once, 42 MB", a path, "environment" or an image
	StartedIn time.Duration // without the time of fetching it
}

// Start finds or fetches what is needed, starts it and returns when every member serves. An error of
// type [*UnavailableError] says that a server can be had in no way here and what to install.
//
// Start takes about two seconds once the programs are cached. The stack ends by Stop, or when the
// process ends in whatever way. A cancelled ctx ends a start, not a stack that Start has returned.
func Start(ctx context.Context, o Options) (*Stack, error) {
	o, err := o.withDefaults()
	if err != nil {
		return nil, err
	}
	c, err := openCache()
	if err != nil {
		return nil, err
	}
	mongod, kafka, err := findPrograms(ctx, c, o)
	if err != nil {
		return nil, fmt.Errorf("devstack: %w", err)
	}
	for try := 1; ; try++ {
		s, err := startServers(ctx, c, o, mongod, kafka)
		if err == nil {
			return s, nil
		}
		if try == 3 || !errors.Is(err, errPortTaken) {
			return nil, fmt.Errorf("devstack: %w", err)
		}
	}
}

// findPrograms has both programs looked for at the same time; neither's absence stops the other's search, so
// that one message names all that is missing.
func findPrograms(ctx context.Context, c cache, o Options) (mongod mongodProgram, kafka kafkaProgram, err error) {
	var wg sync.WaitGroup
	var merr, kerr error
	if o.Mongods > 0 && o.mongoEnv() == "" {
		wg.Go(func() { mongod, merr = findMongod(ctx, c, o) })
	}
	if o.Brokers > 0 && o.kafkaEnv() == "" {
		wg.Go(func() {
			if kafka, kerr = findKafka(ctx, c, o); kerr != nil || kafka.image != "" {
				return
			}
			prep, err := prepareKafka(ctx, c, kafka, o.Progress)
			if err != nil {
				o.Progress(Progress{What: "Kafka", Stage: Preparing, Detail: "starts will be slower: " + err.Error()})
				return
			}
			kafka.prep = prep
		})
	}
	wg.Wait()
	return mongod, kafka, errors.Join(merr, kerr)
}

// mongoEnv is the replica set that the environment names, if it is wanted.
func (o Options) mongoEnv() string {
	if !o.Env || o.Mongods != 1 || o.Mongo.secured() {
		return ""
	}
	return os.Getenv(EnvMongoDB)
}

func (o Options) kafkaEnv() string {
	if !o.Env || o.Brokers != 1 || len(o.Kafka.Users) > 0 || o.Kafka.TLS || o.Kafka.ACLs {
		return ""
	}
	return os.Getenv(EnvKafka)
}

// newStack makes an empty stack with its directory and its guard.
func newStack(ctx context.Context, c cache, parent string) (*Stack, error) {
	dir, release, err := c.dataDir(ctx, parent)
	if err != nil {
		return nil, err
	}
	g, err := newGuard(dir)
	if err != nil {
		release()
		return nil, err
	}
	return &Stack{dir: dir, guard: g, release: release}, nil
}

func startServers(ctx context.Context, c cache, o Options, mongod mongodProgram, kafka kafkaProgram) (*Stack, error) {
	s, err := newStack(ctx, c, o.Dir)
	if err != nil {
		return nil, err
	}
	if o.Mongo.TLS || o.Kafka.TLS {
		if s.tls, err = newAuthority(s.dir); err != nil {
			s.Stop()
			return nil, fmt.Errorf("making certificates: %w", err)
		}
	}
	ctx, cancel := context.WithTimeoutCause(ctx, startWithin, fmt.Errorf("not up within %v", startWithin))
	defer cancel()
	both, ctx := errgroup.WithContext(ctx)
	s.facts.mongo = Server{Name: "mongod", Version: mongod.version, Origin: mongod.origin}
	s.facts.kafka = Server{Name: "Kafka", Version: kafka.version, Origin: kafka.origin}
	if o.Mongods > 0 {
		both.Go(func() error {
			return s.startAndReport(&s.facts.mongo, o, &s.mongods, o.mongoEnv() != "", func() error {
				if uri := o.mongoEnv(); uri != "" {
					return s.useMongo(ctx, uri)
				}
				return s.startMongods(ctx, mongod, o)
			})
		})
	}
	if o.Brokers > 0 {
		both.Go(func() error {
			return s.startAndReport(&s.facts.kafka, o, &s.brokers, o.kafkaEnv() != "", func() error {
				if list := o.kafkaEnv(); list != "" {
					return s.useKafka(ctx, list)
				}
				return s.startBrokers(ctx, kafka, o)
			})
		})
	}
	if err := both.Wait(); err != nil {
		s.Stop()
		return nil, err
	}
	return s, nil
}

// startAndReport starts one kind of server and tells about it.
func (s *Stack) startAndReport(fact *Server, o Options, members *[]*Member, external bool, start func() error) error {
	began := time.Now()
	o.Progress(Progress{What: fact.Name, Stage: Starting, Detail: fact.Version})
	if external {
		fact.Origin = "environment"
	}
	if err := start(); err != nil {
		return err
	}
	fact.Addrs, fact.StartedIn = memberAddrs(*members), time.Since(began)
	o.Progress(Progress{What: fact.Name, Stage: Ready, Detail: fmt.Sprintf("%s  %v  (%s)", fact.Version, fact.Addrs, fact.Origin), Elapsed: fact.StartedIn})
	return nil
}

// Mongods are the members of the replica set, in the order of their numbers.
func (s *Stack) Mongods() []*Member { return slices.Clone(s.mongods) }

// Kafkas are the brokers, in the order of their node ids.
func (s *Stack) Kafkas() []*Member { return slices.Clone(s.brokers) }

// Servers say what runs and how it was had.
func (s *Stack) Servers() []Server {
	var out []Server
	for _, f := range []Server{s.facts.mongo, s.facts.kafka} {
		if len(f.Addrs) > 0 {
			out = append(out, f)
		}
	}
	return out
}

// Stop kills the members and removes their data, and returns when that is done. Servers that the
// environment named are left alone. Further calls do nothing.
func (s *Stack) Stop() {
	s.stop.Do(func() {
		var wg sync.WaitGroup
		for _, m := range slices.Concat(s.mongods, s.brokers) {
			wg.Go(func() { _ = m.Kill() }) // one that does not run, or is not ours, needs no end
		}
		wg.Wait()
		s.guard.close()
		s.release()
	})
}
