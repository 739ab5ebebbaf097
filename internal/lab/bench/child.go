package bench

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// The modes of a child.
const (
	modeStream  = "stream"  // read a change stream with the driver alone
	modeProduce = "produce" // send batches, and nothing else
)

// spec is the task of a child. The child receives it as one line of JSON.
type spec struct {
	Mode       string         `json:"mode"`
	MongoDB    string         `json:"mongodb,omitempty"`
	DB         string         `json:"db,omitempty"`
	Collection string         `json:"collection,omitempty"`
	Start      bson.Timestamp `json:"start"`
	Kafka      []string       `json:"kafka,omitempty"`
	Topic      string         `json:"topic,omitempty"`
	Events     int            `json:"events"`
	Payload    int            `json:"payload"`
	Group      string         `json:"group,omitempty"`
	Handling   handling       `json:"handling,omitzero"`
}

// outcome is the result of a child.
type outcome struct {
	Events  int    `json:"events"`
	Began   int64  `json:"began"` // Unix nanoseconds of the first event, read or sent
	Ended   int64  `json:"ended"` // of the last, read or acknowledged
	Mallocs uint64 `json:"mallocs"`
	Error   string `json:"error,omitempty"`

	// Of handled records: the number of transactions, and their duration in milliseconds.
	Goes int     `json:"goes,omitempty"`
	P50  float64 `json:"p50,omitempty"`
	P99  float64 `json:"p99,omitempty"`

	// The longest time without a handled record, and the sum of those of 100 ms and more, in milliseconds.
	Stall   float64 `json:"stall,omitempty"`
	Stalled float64 `json:"stalled,omitempty"`
}

func perSecond(events int, began, ended int64) float64 {
	if ended <= began {
		return 0
	}
	return float64(events) / time.Duration(ended-began).Seconds()
}

// work is a prepared measurement with open connections.
type work interface {
	run(ctx context.Context) (outcome, error)
	disconnect()
}

// Child runs a child process. It reads its task from in, connects, writes that it is ready, and starts after
// the next line of in. So two children can start at the same time, and connecting is not measured. Child ends
// when in ends: a child never outlives the benchmark.
func Child(ctx context.Context, in io.Reader, out io.Writer) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()

	lines := bufio.NewScanner(in)
	if !lines.Scan() {
		return errors.New("no task was given: only bench starts this command")
	}

	var spec spec
	if err := json.Unmarshal(lines.Bytes(), &spec); err != nil {
		return fmt.Errorf("reading the task: %w", err)
	}

	work, err := newWork(ctx, spec)
	if err != nil {
		return json.NewEncoder(out).Encode(outcome{Error: err.Error()})
	}
	defer work.disconnect()

	// An empty outcome means that the child is ready.
	fmt.Fprintln(out, "{}")
	if !lines.Scan() {
		return nil
	}

	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for lines.Scan() {
		}
		cancel()
	}()

	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	res, err := work.run(ctx)
	// An error is part of the outcome, so that the parent can report it.
	if err != nil {
		res.Error = err.Error()
	}

	runtime.ReadMemStats(&after)
	res.Mallocs = after.Mallocs - before.Mallocs
	if err := json.NewEncoder(out).Encode(res); err != nil {
		return err
	}
	// The parent still reads the figures of this process.
	<-ended
	return nil
}

// newWork connects and returns the measurement of spec.
func newWork(ctx context.Context, spec spec) (work, error) {
	switch spec.Mode {
	case modeStream:
		return newRawStream(ctx, spec)
	case modeProduce:
		return newRawProduce(ctx, spec)
	}

	if spec.Mode != modeReader && spec.Mode != modeHandler {
		return nil, fmt.Errorf("unknown mode %q", spec.Mode)
	}

	effects, err := newEffects(ctx, spec)
	switch {
	case err != nil:
		return nil, err
	case spec.Mode == modeReader:
		return readerLoop{effects}, nil
	}
	return handlerLoop{effects: effects}, nil
}

// child is a child process as its parent uses it.
type child struct {
	cmd   *exec.Cmd
	in    io.WriteCloser
	out   *json.Decoder
	mode  string
	words *tail
}

// startChild starts a child and blocks until it is ready.
func (b *bench) startChild(ctx context.Context, spec spec) (*child, error) {
	child := &child{cmd: exec.CommandContext(ctx, b.Program, ChildCommand), mode: spec.Mode, words: &tail{}}
	child.cmd.Env, child.cmd.Stderr = b.childEnv(), child.words

	var err error
	if child.in, err = child.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := child.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	child.out = json.NewDecoder(out)

	if err := child.cmd.Start(); err != nil {
		return nil, fmt.Errorf("starting a child: %w", err)
	}

	if err = json.NewEncoder(child.in).Encode(spec); err == nil {
		_, err = child.readOutcome()
	}
	if err != nil {
		child.stopProcess()
		return nil, err
	}
	return child, nil
}

func (c *child) pid() int { return c.cmd.Process.Pid }

func (c *child) startWork() error {
	_, err := io.WriteString(c.in, "go\n")
	return err
}

// readOutcome blocks until the child writes its next line.
func (c *child) readOutcome() (outcome, error) {
	var outcome outcome
	if err := c.out.Decode(&outcome); err != nil {
		// It blocks until the end of the log has arrived.
		c.stopProcess()
		return outcome, fmt.Errorf("the child %s ended (%v): %w; end of its log: %s", c.mode, c.cmd.ProcessState, err, c.words)
	}

	if outcome.Error != "" {
		return outcome, fmt.Errorf("%s: %s", c.mode, outcome.Error)
	}
	return outcome, nil
}

func (c *child) stopProcess() {
	_ = c.in.Close()
	late := time.AfterFunc(5*time.Second, func() { _ = c.cmd.Process.Kill() })
	defer late.Stop()
	_ = c.cmd.Wait()
}

// measured has the outcomes of children that ran concurrently.
type measured struct {
	outcomes []outcome
	cpu      []float64 // seconds of each child
	mongod   float64   // seconds of MongoDB
	otherCPU float64
	known    bool
}

// runTogether runs one child per spec concurrently.
func (b *bench) runTogether(ctx context.Context, specs ...spec) (measured, error) {
	var measured measured
	var children []*child
	defer func() {
		for _, c := range children {
			c.stopProcess()
		}
	}()

	// The children are connected before the meter starts, so connecting is not measured.
	pids := b.serverPIDs()
	for _, s := range specs {
		child, err := b.startChild(ctx, s)
		if err != nil {
			return measured, err
		}
		children = append(children, child)
		pids = append(pids, child.pid())
	}

	meter := startMeter(pids...)
	before := make([]usage, len(children))
	for i, c := range children {
		before[i], _ = processUsage(c.pid())
	}
	for _, c := range children {
		if err := c.startWork(); err != nil {
			return measured, err
		}
	}
	for i, c := range children {
		outcome, err := c.readOutcome()
		if err != nil {
			return measured, err
		}
		used, _ := processUsage(c.pid())
		measured.outcomes, measured.cpu = append(measured.outcomes, outcome), append(measured.cpu, used.cpu-before[i].cpu)
	}

	measured.mongod = meter.measureUsed(b.mongods...)
	measured.otherCPU, measured.known = meter.measureOtherCPU()
	return measured, nil
}

// childEnv returns the environment of children, without variables that would change their configuration.
func (b *bench) childEnv() []string {
	var out []string
	for _, v := range os.Environ() {
		if !strings.HasPrefix(v, "OUTRELAY_") {
			out = append(out, v)
		}
	}
	return out
}
