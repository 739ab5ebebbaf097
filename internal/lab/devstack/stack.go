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

// startWithin bounds a start after the programs were found or fetched.
const startWithin = 2 * time.Minute

// A Stack is a running replica set, Kafka cluster or both. The addresses of its members never change.
type Stack struct {
	dir     string
	uri     string // empty unless the environment names it
	root    User
	mongods []*Member
	brokers []*Member
	tls     *authority
	facts   struct{ mongo, kafka Server }

	guard   *guard
	release func()
	stop    sync.Once
}

// Server describes a running server, for people.
type Server struct {
	Name      string // "mongod" or "Kafka"
	Version   string // may be empty for a broker named by the environment
	Addrs     []string
	Origin    string        // "cached", "fetched once, 42 MB", a path, "environment" or an image
	StartedIn time.Duration // excluding the time to fetch it
}

// Start finds or fetches the servers, starts them, and blocks until every member serves. If no way to get a
// server works on this machine, the error is an [*UnavailableError], which names the programs to install.
//
// With cached programs, Start takes about two seconds. The stack ends by Stop, or when the process ends. The
// end of ctx interrupts Start, but does not end a stack that Start has returned.
func Start(ctx context.Context, options Options) (*Stack, error) {
	options, err := options.withDefaults()
	if err != nil {
		return nil, err
	}

	cache, err := openCache()
	if err != nil {
		return nil, err
	}

	mongod, kafka, err := findPrograms(ctx, cache, options)
	if err != nil {
		return nil, fmt.Errorf("devstack: %w", err)
	}

	// Another process may take a port between the choice and the start.
	for try := 1; ; try++ {
		stack, err := startServers(ctx, cache, options, mongod, kafka)
		if err == nil {
			return stack, nil
		}
		if try == 3 || !errors.Is(err, errPortTaken) {
			return nil, fmt.Errorf("devstack: %w", err)
		}
	}
}

// StartEmpty returns a stack without servers, for [Stack.Run].
func StartEmpty(ctx context.Context) (*Stack, error) {
	cache, err := openCache()
	if err != nil {
		return nil, err
	}
	stack, err := newStack(ctx, cache, "")
	if err != nil {
		return nil, fmt.Errorf("devstack: %w", err)
	}
	return stack, nil
}

// findPrograms searches for both programs concurrently. If one search fails, the other continues, so that the
// error names all missing programs.
func findPrograms(ctx context.Context, cache cache, options Options) (mongod mongodProgram, kafka kafkaProgram, err error) {
	var wg sync.WaitGroup
	var merr, kerr error
	if options.Mongods > 0 && options.mongoEnv() == "" {
		wg.Go(func() { mongod, merr = findMongod(ctx, cache, options) })
	}

	if options.Brokers > 0 && options.kafkaEnv() == "" {
		wg.Go(func() {
			kafka, kerr = findKafka(ctx, cache, options)
			if kerr != nil || kafka.image != "" {
				return
			}

			// Without the prepared files a start works too, only slower.
			prep, err := prepareKafka(ctx, cache, kafka, options.Progress)
			if err != nil {
				options.Progress(Progress{What: "Kafka", Stage: Preparing, Detail: "starts will be slower: " + err.Error()})
				return
			}
			kafka.prep = prep
		})
	}

	wg.Wait()
	return mongod, kafka, errors.Join(merr, kerr)
}

// Given returns the servers of the environment that Start uses with these options: the connection string of a replica set, and
// the addresses of brokers separated by commas. Each is "" if Start starts its own.
func (o Options) Given() (uri, brokers string) { return o.mongoEnv(), o.kafkaEnv() }

// mongoEnv returns the replica set named by the environment, or "" if the options do not permit it.
func (o Options) mongoEnv() string {
	if !o.Env || o.Mongods != 1 || o.Mongo.secured() {
		return ""
	}
	return os.Getenv(EnvMongoDB)
}

// kafkaEnv returns the brokers named by the environment, or "" if the options do not permit them.
func (o Options) kafkaEnv() string {
	if !o.Env || o.Brokers != 1 || len(o.Kafka.Users) > 0 || o.Kafka.TLS || o.Kafka.ACLs {
		return ""
	}
	return os.Getenv(EnvKafka)
}

// newStack returns an empty stack with its directory and its guard.
func newStack(ctx context.Context, cache cache, parent string) (*Stack, error) {
	dir, release, err := cache.dataDir(ctx, parent)
	if err != nil {
		return nil, err
	}
	guard, err := newGuard(dir)
	if err != nil {
		release()
		return nil, err
	}

	return &Stack{dir: dir, guard: guard, release: release}, nil
}

// startServers starts both kinds of servers concurrently and blocks until all members serve.
func startServers(ctx context.Context, cache cache, options Options, mongod mongodProgram, kafka kafkaProgram) (*Stack, error) {
	stack, err := newStack(ctx, cache, options.Dir)
	if err != nil {
		return nil, err
	}

	if options.Mongo.TLS || options.Kafka.TLS {
		if stack.tls, err = newAuthority(stack.dir); err != nil {
			stack.Stop()
			return nil, fmt.Errorf("making certificates: %w", err)
		}
	}

	ctx, cancel := context.WithTimeoutCause(ctx, startWithin, fmt.Errorf("not up within %v", startWithin))
	defer cancel()
	both, ctx := errgroup.WithContext(ctx)

	stack.facts.mongo = Server{Name: "mongod", Version: mongod.version, Origin: mongod.origin}
	stack.facts.kafka = Server{Name: "Kafka", Version: kafka.version, Origin: kafka.origin}

	if options.Mongods > 0 {
		both.Go(func() error {
			return stack.startAndReport(&stack.facts.mongo, options, &stack.mongods, options.mongoEnv() != "", func() error {
				if uri := options.mongoEnv(); uri != "" {
					return stack.useMongo(ctx, uri)
				}
				return stack.startMongods(ctx, mongod, options)
			})
		})
	}

	if options.Brokers > 0 {
		both.Go(func() error {
			return stack.startAndReport(&stack.facts.kafka, options, &stack.brokers, options.kafkaEnv() != "", func() error {
				if list := options.kafkaEnv(); list != "" {
					return stack.useKafka(ctx, list)
				}
				return kafka.addHint(stack.startBrokers(ctx, kafka, options))
			})
		})
	}

	if err := both.Wait(); err != nil {
		stack.Stop()
		return nil, err
	}
	return stack, nil
}

// startAndReport starts one kind of server and reports its progress.
func (s *Stack) startAndReport(fact *Server, options Options, members *[]*Member, external bool, start func() error) error {
	began := time.Now()
	options.Progress(Progress{What: fact.Name, Stage: Starting, Detail: fact.Version})
	if external {
		fact.Origin = "environment"
	}

	if err := start(); err != nil {
		return err
	}

	fact.Addrs, fact.StartedIn = memberAddrs(*members), time.Since(began)
	options.Progress(Progress{
		What: fact.Name, Stage: Ready, Elapsed: fact.StartedIn,
		Detail: fmt.Sprintf("%s  %v  (%s)", fact.Version, fact.Addrs, fact.Origin),
	})
	return nil
}

// Mongods returns the members of the replica set, ordered by number.
func (s *Stack) Mongods() []*Member { return slices.Clone(s.mongods) }

// Kafkas returns the brokers, ordered by node id.
func (s *Stack) Kafkas() []*Member { return slices.Clone(s.brokers) }

// Servers describes the running servers and their origin.
func (s *Stack) Servers() []Server {
	var out []Server
	for _, f := range []Server{s.facts.mongo, s.facts.kafka} {
		if len(f.Addrs) > 0 {
			out = append(out, f)
		}
	}
	return out
}

// Stop kills the members, removes their data, and blocks until this is done. It does not stop servers named by
// the environment. Further calls do nothing.
func (s *Stack) Stop() {
	s.stop.Do(func() {
		var wg sync.WaitGroup
		for _, m := range slices.Concat(s.mongods, s.brokers) {
			// The error of a member that does not run, or is external, does not matter.
			wg.Go(func() { _ = m.Kill() })
		}
		wg.Wait()

		s.guard.close()
		s.release()
	})
}
