// Package servers starts MongoDB, Kafka and the programs of the example, which end together. A
// service does not need it. As an alternative, see compose.yaml.
package servers

import (
	"context"
	"io"

	"github.com/outrelay/outrelay/internal/lab/devstack"
)

// Servers are a replica set with one member and one broker. They run on this machine, or are the
// ones in OUTRELAY_TEST_MONGODB_URI and OUTRELAY_TEST_KAFKA.
type Servers struct{ stack *devstack.Stack }

// Program is a program that was started with the servers.
type Program = devstack.Program

// Start starts the servers, and downloads them if necessary. It writes lines about its progress.
func Start(ctx context.Context, progress io.Writer) (*Servers, error) {
	s, err := devstack.Start(ctx, devstack.Options{
		Mongods:  1,
		Brokers:  1,
		Env:      true,
		Quick:    true,
		Progress: devstack.Lines(progress),
	})
	if err != nil {
		return nil, err
	}

	return &Servers{s}, nil
}

// MongoURI returns the URI of MongoDB.
func (s *Servers) MongoURI() string { return s.stack.MongoURI() }

// Brokers returns the addresses of Kafka.
func (s *Servers) Brokers() []string { return s.stack.Brokers() }

// Dir returns a directory that is removed when the servers stop.
func (s *Servers) Dir() string { return s.stack.Dir() }

// Run starts a program. Its output is written to the file <name>.log in Dir, so the name must be
// unique.
func (s *Servers) Run(name string, env []string, path string, args ...string) (*Program, error) {
	return s.stack.Run(name, env, path, args...)
}

// Stop ends the programs and the servers that Start has started, and removes their data.
func (s *Servers) Stop() { s.stack.Stop() }
