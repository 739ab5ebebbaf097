// Package servers starts what the example needs and a machine may not have: MongoDB, Kafka, and programs beside them that
// end with them. It is no part of what a service would write; see compose.yaml for another way to the same.
package servers

import (
	"context"
	"io"

	"github.com/outrelay/outrelay/internal/devstack"
)

// Servers are a replica set of one and one broker, on this machine or where OUTRELAY_TEST_MONGODB_URI and
// OUTRELAY_TEST_KAFKA say.
type Servers struct{ stack *devstack.Stack }

// Program is a program that was started beside the servers.
type Program = devstack.Program

// Start finds or fetches the servers, starts them, and tells about it in lines on progress.
func Start(ctx context.Context, progress io.Writer) (*Servers, error) {
	s, err := devstack.Start(ctx, devstack.Options{Mongods: 1, Brokers: 1, Env: true, Quick: true, Progress: devstack.Lines(progress)})
	if err != nil {
		return nil, err
	}
	return &Servers{s}, nil
}

// MongoURI is where MongoDB is.
func (s *Servers) MongoURI() string { return s.stack.MongoURI() }

// Brokers are where Kafka is.
func (s *Servers) Brokers() []string { return s.stack.Brokers() }

// Dir is a directory that is removed when the servers stop.
func (s *Servers) Dir() string { return s.stack.Dir() }

// Run starts a program with its output in the log <name>.log of Dir; the name must be new.
func (s *Servers) Run(name string, env []string, path string, args ...string) (*Program, error) {
	return s.stack.Run(name, env, path, args...)
}

// Stop ends the programs and the servers that Start has started, and removes what they have stored.
func (s *Servers) Stop() { s.stack.Stop() }
