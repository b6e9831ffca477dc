/**
 * The documents of the service, as far as the page reads them. Times are microseconds, sizes bytes.
 *
 * @typedef {string} Kind a name of `kinds.js`
 * @typedef {"compute" | "offload" | "reload"} StreamName
 *
 * @typedef {{bytes: number, offload_us: number, reload_us: number}} Offload
 *
 * @typedef {object} Stage
 * @property {number} device
 * @property {number} forward_us
 * @property {number} backward_input_us
 * @property {number} backward_weight_us
 * @property {number} activation_bytes
 * @property {number} backward_weight_bytes
 * @property {Offload | null} [offload]
 * @property {unknown[] | null} [modes]
 *
 * @typedef {number | {forward: number, backward: number}} TransferUs
 *
 * @typedef {object} Problem
 * @property {string} format
 * @property {string} [name]
 * @property {number} microbatches
 * @property {"makespan" | "device_span"} objective
 * @property {TransferUs | TransferUs[]} [transfer_us] between the devices of neighbouring stages, or a list by boundary
 * @property {{duplex?: boolean, shared_by?: number[][]} | null} [copy_channels]
 * @property {{memory_bytes?: number | null, name?: string}[]} devices
 * @property {Stage[]} stages
 * @property {string} [source]
 * @property {Record<string, number | null>[] | null} [microbatch_factors]
 * @property {"given" | "free"} [microbatch_order]
 * @property {{count: number} | null} [slices]
 *
 * @typedef {object} PlannedOp
 * @property {Kind} op
 * @property {number} [stage]
 * @property {number} [part] of a spread pass: its device
 * @property {number} microbatch
 * @property {string} [with] the other op of a block
 * @property {number} start_us
 * @property {number} end_us
 * @property {string[]} [waits]
 * @property {string} [mode] of an F whose activation is not kept whole on the device
 *
 * @typedef {object} DevicePlan
 * @property {PlannedOp[]} compute
 * @property {PlannedOp[]} [offload]
 * @property {PlannedOp[]} [reload]
 * @property {number} peak_bytes
 * @property {number} peak_bytes_any_timing
 * @property {number} busy_us
 * @property {number} bubble
 *
 * @typedef {object} Schedule
 * @property {Problem} problem
 * @property {"optimal" | "feasible"} status
 * @property {"makespan" | "device_span"} objective
 * @property {number} value_us
 * @property {number} bound_us
 * @property {number} gap
 * @property {string} method
 * @property {number} solve_seconds
 * @property {DevicePlan[]} devices
 *
 * @typedef {object} DeviceAnalysis
 * @property {number} idle_before_us
 * @property {number} idle_within_us
 * @property {number} idle_after_us
 * @property {{times_us: number[], bytes: number[]}} memory
 *
 * @typedef {object} Analysis of a schedule
 * @property {DeviceAnalysis[]} devices
 * @property {Record<string, {needs: string[], starts_after: string | null, delay_us: number}>} ops by name
 * @property {string[]} critical_path
 *
 * @typedef {{name: string, note: string, schedule: Schedule}} FoundSchedule
 *
 * @typedef {object} Recognized a file
 * @property {"problem" | "schedule" | "trace" | "torch-csv" | "config"} kind
 * @property {string[]} notes
 * @property {FoundSchedule[]} schedules
 *
 * @typedef {"queued" | "running" | "succeeded" | "failed" | "cancelled"} Status
 *
 * @typedef {object} JobConfig
 * @property {string} method
 * @property {number} time_limit_s
 * @property {number} gap
 * @property {number} workers
 * @property {number} seed
 * @property {number} priority
 * @property {string} name
 * @property {string[]} tags
 *
 * @typedef {object} Job
 * @property {string} id
 * @property {string} name
 * @property {string[]} tags
 * @property {string} method
 * @property {Partial<JobConfig>} [config] as it was submitted
 * @property {Status} status
 * @property {"makespan" | "device_span"} objective
 * @property {(number | null)[] | null} [budgets_bytes] of an infeasible job: those that would do; null: no limit
 * @property {number | null} value_us
 * @property {number | null} bound_us
 * @property {number | null} gap
 * @property {string} note
 * @property {number | null} bubble of the best schedule
 * @property {number | null} devices null, like the next two: a job of an earlier version
 * @property {number | null} stages
 * @property {number | null} microbatches
 * @property {{reason: "optimal" | "feasible" | "infeasible" | "no_solution", limit: "time" | "gap" | "memory" | "interrupted" | null} | null} termination
 * @property {string | null} error
 * @property {number} revision
 * @property {number} attempt
 * @property {number | null} queue_place
 * @property {string} submitted_at
 * @property {string | null} started_at
 * @property {string | null} finished_at
 *
 * @typedef {object} Machine
 * @property {string} name
 * @property {{gpus_per_node: number, memory_bytes: number}} facts
 *
 * @typedef {object} PlanRequest
 * @property {string | Record<string, unknown>} model a name, or the object of a config.json
 * @property {number | string} gpus
 * @property {string | Machine} machine
 * @property {number | string} sequence
 * @property {number | string} global_batch
 * @property {Record<string, unknown>} [fixed] values by option
 *
 * @typedef {object} Strategy a row of a plan; degrees by option
 * @property {"solved" | "beaten" | "does_not_fit"} end
 * @property {number | null} seconds of a step; null: it has no schedule
 * @property {number} bound_s
 * @property {number | null} memory_bytes of the fullest rank
 * @property {string} reason
 * @property {Record<string, number>} [lost_s] seconds beyond the model's own operations, by kind
 * @property {Record<string, number>[]} [ranks] bytes by kind, for each device of the pipeline
 * @property {number} [solved]
 *
 * @typedef {object} Plan
 * @property {string} model
 * @property {string} machine
 * @property {number} gpus
 * @property {number} error of predictions on the machine; 0: nothing was measured there
 * @property {boolean} complete
 * @property {string[]} assumptions
 * @property {number} device_memory_bytes of a GPU
 * @property {Record<string, any> | null} best
 * @property {(Strategy & Record<string, number | string>)[]} strategies
 *
 * @typedef {object} Launch
 * @property {{name: string, text: string | null}[]} files null: the plan's schedule
 * @property {string[]} lost
 * @property {number} seconds predicted of a step as the trainer runs it
 *
 * @typedef {object} JobEvent
 * @property {string} job_id
 * @property {"incumbent" | "bound" | "strategies" | "status"} kind
 * @property {number} revision
 * @property {string} at
 * @property {number} attempt
 * @property {Status} status
 * @property {number | null} value_us
 * @property {number | null} bound_us
 * @property {string | null} method
 * @property {number | null} seconds since the attempt began
 *
 * @typedef {object} Checked a submission that would be taken
 * @property {number} devices
 * @property {number} stages
 * @property {number} microbatches
 * @property {number} ops
 *
 * @typedef {object} Fault
 * @property {string} pointer JSON pointer into the body that was sent
 * @property {string} code
 * @property {string} detail
 */

export {};
