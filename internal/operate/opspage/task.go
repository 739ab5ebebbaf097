package opspage

import (
	"context"
	"errors"
	"net/http"
	"runtime/debug"
	"sync/atomic"
	"time"
)

// task is a confirmed action. It goes on when its request has ended, so that a purge of a million envelopes needs no open page. It ends
// early if the process ends; then the finished part remains.
type task struct {
	Title string
	Total int64 // of the affected entries; 0 if unknown
	Back  string

	actor string
	began time.Time
	done  atomic.Int64

	ended  chan struct{} // closed at the end; notice and err are set before
	notice notice
	err    error
}

// errPanicked is the error of an action that panicked. The log has the stack.
var errPanicked = errors.New("the action failed unexpectedly; the log of the process has the cause")

// startTask runs a confirmed action. From then on, the context of call is that of the action.
func (p *page) startTask(call *call, plan preview, name string) *task {
	started := &task{
		Title: call.action.title, Total: max(plan.Total, plan.Count, 0), Back: call.back, actor: call.who.Actor.Name, began: time.Now(), ended: make(chan struct{}),
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(call.ctx), p.o.Task)
	call.ctx, call.did = ctx, started.done.Store
	slot, watcher := call.slot(), call.v.Watcher

	go func() {
		defer close(started.ended)
		defer cancel()
		defer func() {
			if cause := recover(); cause != nil {
				p.o.Log.Error("an action of the operator's page panicked", "action", name, "error", cause, "stack", string(debug.Stack()))
				started.err = errPanicked
			}
		}()
		started.notice, started.err = plan.run()
		started.notice.actor = started.actor
		if started.err == nil {
			p.o.Log.Info("an operator acted", "action", name, "actor", started.actor, "watcher", watcher, "slot", slot)
		}
	}()
	return started
}

// finishAction shows the result of an action, or its progress if it takes longer than the patience of the page.
func (p *page) finishAction(response http.ResponseWriter, request *http.Request, call *call, started *task) {
	patience := time.NewTimer(p.o.Patience)
	defer patience.Stop()
	select {
	case <-started.ended:
	case <-patience.C:
		http.Redirect(response, request, call.v.Link("/task", "id", p.tasks.put(started)), http.StatusSeeOther)
		return
	}

	if started.err != nil {
		p.serveProblem(response, request, call, started.err)
		return
	}
	http.Redirect(response, request, call.linkBack(call.action.back, "done", p.notices.put(&started.notice)), http.StatusSeeOther)
}

// taskView is the data of the page of a task.
type taskView struct {
	*task
	Done    int64
	Seconds float64
	Notice  *notice  // of a task that succeeded
	Failed  *problem // of a task that failed
}

// Running reports whether the task has not ended.
func (v taskView) Running() bool { return v.Notice == nil && v.Failed == nil }

func showTask(call *call) (any, error) {
	started, known := call.tasks.get(call.q.Get("id"))
	if !known || started.actor != call.who.Actor.Name {
		return nil, invalidInput("this process runs no action of yours with this id; the audit log shows finished actions")
	}

	view := taskView{task: started, Done: started.done.Load(), Seconds: call.v.Now.Sub(started.began).Seconds()}
	select {
	case <-started.ended:
		if started.err != nil {
			view.Failed = newProblem(started.err)
		} else {
			view.Notice = &started.notice
		}
	default:
	}
	return view, nil
}
