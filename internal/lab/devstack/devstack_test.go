//go:build unix

package devstack_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/segmentio/kafka-go"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.uber.org/goleak"

	"github.com/outrelay/outrelay/internal/lab/devstack"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
)

// parentVar makes this test program start a stack and end in the way its value says.
const parentVar = "OUTRELAY_DEVSTACK_TEST_PARENT"

func TestMain(m *testing.M) {
	if way := os.Getenv(parentVar); way != "" {
		runParent(way)
		return
	}
	goleak.VerifyTestMain(stacktest.Settled(m, goleak.Find))
}

// runParent starts a mongod, prints its address and data directory, and ends without Stop.
func runParent(way string) {
	s, err := devstack.Start(context.Background(), devstack.Options{Mongods: 1, Dir: os.Getenv(parentVar + "_DIR")})
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}

	m := s.Mongods()[0]
	if way == "paused" {
		_ = m.Pause()
	}

	fmt.Println(m.Addr())
	if way == "panic" {
		_, _ = bufio.NewReader(os.Stdin).ReadString('\n')
		panic("the test's own")
	}
	if way == "handled interrupt" {
		ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
		defer stop()
		<-ctx.Done()
		s.Stop()
		return
	}

	select {}
}

// However the process that started a stack ends, its members end and their data goes.
func TestNothingOutlivesItsParent(t *testing.T) {
	t.Parallel()
	stacktest.LockMachine(t)
	for way, end := range map[string]func(*exec.Cmd, io.Writer) error{
		"kill -9":           func(c *exec.Cmd, _ io.Writer) error { return c.Process.Kill() },
		"paused":            func(c *exec.Cmd, _ io.Writer) error { return c.Process.Kill() },
		"group":             func(c *exec.Cmd, _ io.Writer) error { return syscall.Kill(-c.Process.Pid, syscall.SIGKILL) },
		"interrupt":         func(c *exec.Cmd, _ io.Writer) error { return syscall.Kill(-c.Process.Pid, syscall.SIGINT) },
		"handled interrupt": func(c *exec.Cmd, _ io.Writer) error { return syscall.Kill(-c.Process.Pid, syscall.SIGINT) },
		"panic":             func(_ *exec.Cmd, in io.Writer) error { _, err := io.WriteString(in, "\n"); return err },
	} {
		t.Run(way, func(t *testing.T) {
			dir := t.TempDir()

			cmd := exec.Command(os.Args[0])
			cmd.Env = append(os.Environ(), parentVar+"="+way, parentVar+"_DIR="+dir)
			cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
			in, err := cmd.StdinPipe()
			if err != nil {
				t.Fatal(err)
			}
			out, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}

			line, err := bufio.NewReader(out).ReadString('\n')
			if err != nil {
				t.Fatalf("the parent printed %q: %v", line, err)
			}
			// The open connection ends when the mongod does: a signal to wait for.
			conn, err := net.Dial("tcp", strings.TrimSpace(line))
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()

			if err := end(cmd, in); err != nil {
				t.Fatal(err)
			}
			began := time.Now()
			_ = cmd.Wait()
			_ = conn.SetReadDeadline(time.Now().Add(patience))
			if _, err := conn.Read(make([]byte, 1)); errors.Is(err, os.ErrDeadlineExceeded) {
				t.Fatalf("the mongod outlived its parent by %v", patience)
			}
			t.Logf("mongod gone %v after its parent", time.Since(began).Round(time.Millisecond))

			eventually(t, func() error {
				left, err := os.ReadDir(dir)
				if err == nil && len(left) > 0 {
					err = fmt.Errorf("%s is left behind", left[0].Name())
				}
				return err
			})
		})
	}
}

func TestSingleMembers(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	began := time.Now()
	s := stacktest.Own(t, devstack.Options{Mongods: 1, Brokers: 1, Quick: true, Dir: dir})
	t.Logf("up after %v: %+v", time.Since(began).Round(time.Millisecond), s.Servers())
	mongod, broker := s.Mongods()[0], s.Kafkas()[0]

	t.Run("mongod", func(t *testing.T) {
		c := newClient(t, s)
		insert(t, c)
		ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
		defer cancel()
		failpoint := bson.D{{Key: "configureFailPoint", Value: "failCommand"}, {Key: "mode", Value: "off"}}
		if err := c.Database("admin").RunCommand(ctx, failpoint).Err(); err != nil {
			t.Error("fail points: ", err)
		}
		pid := mongod.PID()
		if err := mongod.Restart(ctx); err != nil {
			t.Fatal(err)
		}
		if pid == 0 || mongod.PID() == pid {
			t.Errorf("process %d became %d by a restart", pid, mongod.PID())
		}
		n, err := c.Database("x").Collection("y").CountDocuments(ctx, bson.D{})
		if err != nil || n != 1 {
			t.Errorf("%d documents after a restart (%v), want 1", n, err)
		}
	})
	t.Run("broker", func(t *testing.T) {
		topic := stacktest.Name(t)
		stacktest.CreateTopicOn(t, s.Brokers(), topic, 2, 1)
		if err := broker.Pause(); err != nil {
			t.Fatal(err)
		}
		short, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		defer cancel()
		if _, err := s.Leader(short, topic, 0); err == nil {
			t.Error("a paused broker responded")
		}
		if err := broker.Resume(); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 4*patience)
		defer cancel()
		if m, err := s.Leader(ctx, topic, 0); err != nil || m != broker {
			t.Errorf("leader %v, %v", m, err)
		}
		if err := broker.Kill(); err != nil {
			t.Fatal(err)
		}
		if err := broker.Kill(); !errors.Is(err, devstack.ErrNotRunning) {
			t.Errorf("second kill: %v", err)
		}
		began := time.Now()
		if err := broker.Restart(ctx); err != nil {
			t.Fatal(err)
		}
		t.Logf("broker back after %v", time.Since(began).Round(time.Millisecond))
		eventually(t, func() error { _, err := s.Leader(ctx, topic, 1); return err })
		// A broker that has restarted may have no response yet.
		eventually(t, func() error {
			err := write(ctx, s.Brokers(), "not-there")
			if err == nil {
				t.Fatal("a missing topic was written to; topics must not be created by themselves")
			}
			if !errors.Is(err, kafka.UnknownTopicOrPartition) {
				return fmt.Errorf("write to a missing topic: %w", err)
			}
			return nil
		})
	})
	t.Run("topic", func(t *testing.T) { testSettings(t, s) })
	began = time.Now()
	s.Stop()
	t.Logf("down after %v", time.Since(began).Round(time.Millisecond))
	s.Stop()
	for _, addr := range []string{mongod.Addr(), broker.Addr()} {
		if c, err := net.Dial("tcp", addr); err == nil {
			_ = c.Close()
			t.Errorf("%s still listens after Stop", addr)
		}
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("left after Stop: %v %v", left, err)
	}
}

// testSettings makes a topic reject old records, and restores it.
func testSettings(t *testing.T, s *devstack.Stack) {
	t.Helper()
	topic := stacktest.Name(t)
	stacktest.CreateTopicOn(t, s.Brokers(), topic, 1, 1)
	ctx, cancel := context.WithTimeout(t.Context(), 4*patience)
	defer cancel()
	tr := &kafka.Transport{}
	defer tr.CloseIdleConnections()
	cl := &kafka.Client{Addr: kafka.TCP(s.Brokers()...), Transport: tr}
	for _, c := range []struct {
		value string
		want  error
	}{{"0", kafka.InvalidTimestamp}, {"3600000", nil}, {"0", kafka.InvalidTimestamp}, {"", nil}} {
		eventually(t, func() error {
			return devstack.SetTopic(ctx, s.Brokers(), topic, "message.timestamp.before.max.ms", c.value)
		})
		eventually(t, func() error {
			old := kafka.NewRecordReader(kafka.Record{Time: time.Now().Add(-time.Second), Value: kafka.NewBytes([]byte("v"))})
			res, err := cl.Produce(ctx, &kafka.ProduceRequest{Topic: topic, RequiredAcks: kafka.RequireAll, Records: old})
			if err == nil {
				err = res.Error
			}
			if !errors.Is(err, c.want) {
				return fmt.Errorf("with %q an old record: %w", c.value, err)
			}
			return nil
		})
	}

	if err := devstack.SetTopic(ctx, s.Brokers(), topic, "no.such.setting", "1"); err == nil {
		t.Error("a setting that there is not was taken")
	}
}

func TestThreeMembers(t *testing.T) {
	t.Parallel()
	began := time.Now()
	s := stacktest.Own(t, devstack.Options{Mongods: 3, Brokers: 3, Quick: true})
	t.Logf("up after %v", time.Since(began).Round(time.Millisecond))
	ctx, cancel := context.WithTimeout(t.Context(), 6*patience)
	defer cancel()
	insert(t, newClient(t, s))
	old, err := s.Primary(ctx)
	if err != nil {
		t.Fatal(err)
	}
	topic := stacktest.Name(t)
	stacktest.CreateTopicOn(t, s.Brokers(), topic, 1, 3)

	began = time.Now()
	if err := old.Kill(); err != nil {
		t.Fatal(err)
	}
	next, err := s.Primary(ctx)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%s is primary %v after the kill of %s", next.Name(), time.Since(began).Round(time.Millisecond), old.Name())
	if next == old {
		t.Error("a dead member is primary")
	}
	if err := old.Restart(ctx); err != nil {
		t.Fatal(err)
	}

	leader, err := s.Leader(ctx, topic, 0)
	if err != nil {
		t.Fatal(err)
	}
	to := leader.ID()%3 + 1
	began = time.Now()
	if err := s.MoveLeader(ctx, topic, 0, to); err != nil {
		t.Fatal(err)
	}
	t.Logf("leader moved in %v", time.Since(began).Round(time.Millisecond))
	// A broker learns of the new leader a little later than another one.
	var moved *devstack.Member
	eventually(t, func() (err error) {
		if moved, err = s.Leader(ctx, topic, 0); err == nil && moved.ID() != to {
			err = fmt.Errorf("the leader is %s, want broker %d", moved.Name(), to)
		}
		return err
	})
	began = time.Now()
	if err := moved.Kill(); err != nil {
		t.Fatal(err)
	}
	eventually(t, func() error {
		m, err := s.Leader(ctx, topic, 0)
		if err == nil && m == moved {
			err = errors.New("the dead broker still leads")
		}
		return err
	})
	t.Logf("new leader %v after the kill", time.Since(began).Round(time.Millisecond))
	if err := moved.Restart(ctx); err != nil {
		t.Fatal(err)
	}
}

func newClient(t *testing.T, s *devstack.Stack) *mongo.Client {
	t.Helper()
	c, err := mongo.Connect(options.Client().ApplyURI(s.MongoURI()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Disconnect(context.WithoutCancel(t.Context())) })
	return c
}

func insert(t *testing.T, c *mongo.Client) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if _, err := c.Database("x").Collection("y").InsertOne(ctx, bson.D{{Key: "a", Value: 1}}); err != nil {
		t.Fatal(err)
	}
}

func write(ctx context.Context, brokers []string, topic string) error {
	tr := &kafka.Transport{}
	defer tr.CloseIdleConnections()
	w := &kafka.Writer{Addr: kafka.TCP(brokers...), Topic: topic, Transport: tr, MaxAttempts: 1, RequiredAcks: kafka.RequireAll, BatchTimeout: time.Millisecond}
	err := w.WriteMessages(ctx, kafka.Message{Value: []byte("v")})
	return errors.Join(err, w.Close())
}

// patience is how long anything may take on a machine that is busy with other things.
const patience = 60 * time.Second

// eventually calls check until it succeeds.
func eventually(t *testing.T, check func() error) {
	t.Helper()
	var err error
	stacktest.Eventually(t, "the check succeeds", func() bool { err = check(); return err == nil }, func() any { return err })
}
