"""What is known by name about torch's functions, tensor methods and modules. Data only.

A name stands in a set only if what the set says holds for every way to call it that returns at all.
"""

from __future__ import annotations


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Elementwise functions of one tensor: same shape, no side effect, finite gradient wherever the value is finite.
POINTWISE_SMOOTH = _words("""
    abs absolute neg negative positive sin cos tanh sigmoid relu relu6 gelu silu elu selu celu mish softplus softsign
    hardtanh hardsigmoid hardswish leaky_relu logsigmoid erf atan arctan asinh arcsinh exp expm1 sinh cosh square
    clamp clip clamp_min clamp_max clone contiguous detach floor ceil round trunc sign sgn frac nan_to_num
    float double half bfloat16
""")
#: Elementwise too, but the value or the gradient is not finite everywhere.
POINTWISE_PARTIAL = _words("""
    log log2 log10 log1p sqrt rsqrt reciprocal tan asin acos arcsin arccos acosh atanh arctanh erfinv logit lgamma
    digamma exp2
""")
#: Elementwise, giving booleans.
POINTWISE_BOOL = _words("isnan isinf isfinite isneginf isposinf signbit logical_not")
#: Elementwise functions of two tensors (or a tensor and a number): the shape is the broadcast one.
POINTWISE_PAIR = _words("""
    add sub subtract mul multiply div divide true_divide maximum minimum fmax fmin pow remainder fmod atan2 hypot
""")
#: The same, giving booleans.
PAIR_BOOL = _words(
    "eq ne lt le gt ge logical_and logical_or logical_xor greater less greater_equal less_equal not_equal"
)
#: Reductions: without arguments behind the tensor they give a tensor with no dimensions.
REDUCTIONS = _words("""
    sum mean prod std var norm max min amax amin argmax argmin any all median nansum nanmean logsumexp
    count_nonzero dot vdot trace det dist
""")
#: Reductions whose value is a boolean.
REDUCTIONS_BOOL = _words("any all")
#: Reductions that always give floating point numbers, whatever they are given (integers raise).
REDUCTIONS_FLOAT = _words("mean std var norm nanmean logsumexp dist")
#: Other functions and methods that return one new tensor (or a view), with no side effect and no random numbers.
OTHER_PURE = _words("""
    reshape view view_as flatten unflatten squeeze unsqueeze transpose permute t swapaxes movedim expand expand_as
    repeat repeat_interleave roll flip matmul mm bmm mv addmm baddbmm outer einsum tensordot softmax log_softmax
    cumsum cumprod cat stack concat hstack vstack gather scatter scatter_add index_select masked_fill where tril triu
    linear conv1d conv2d conv3d layer_norm group_norm rms_norm normalize embedding one_hot pad interpolate
    avg_pool1d avg_pool2d max_pool1d max_pool2d adaptive_avg_pool1d adaptive_avg_pool2d glu logaddexp lerp addcmul
    addcdiv cosine_similarity cross_entropy mse_loss l1_loss smooth_l1_loss nll_loss binary_cross_entropy
    binary_cross_entropy_with_logits kl_div scaled_dot_product_attention to type type_as long int short bool cpu cuda
    zeros_like ones_like full_like new_zeros new_ones new_full diagonal diag narrow select take kron cross cdist
    bitwise_and bitwise_or bitwise_not bitwise_xor masked_select nonzero unique sort topk argsort cummax cummin
    isclose bincount histc requires_grad_
""")
#: Functions of one tensor and settings whose result has the tensor's shape.
SAME_SHAPE = _words("""
    softmax log_softmax cumsum tril triu zeros_like ones_like full_like to masked_fill normalize long int bool
""")
#: Functions and methods whose result can be a view of their tensor, or the tensor itself.
VIEWS = _words("""
    reshape view view_as flatten unflatten squeeze unsqueeze transpose permute t swapaxes movedim expand expand_as
    contiguous detach diagonal narrow select to type type_as float double half bfloat16 long int bool cpu cuda real imag
    ravel chunk split
""")
#: Functions and methods whose result has another dtype, or device, than their tensor may have.
CASTS = _words("""
    to type type_as float double half bfloat16 long int short bool cpu cuda argmax argmin argsort count_nonzero nonzero
    one_hot bincount logical_not logical_and logical_or logical_xor
""")
#: Constructors in `torch` that return a tensor without looking at one.
CONSTRUCTORS = _words(
    "zeros ones full empty arange linspace eye tensor as_tensor from_numpy rand randn randint rand_like randn_like"
)
#: Of these, the ones without side effect and random numbers.
PURE_CONSTRUCTORS = CONSTRUCTORS - _words("rand randn randint rand_like randn_like empty")

POINTWISE = POINTWISE_SMOOTH | POINTWISE_PARTIAL | POINTWISE_BOOL
PURE = (POINTWISE | POINTWISE_PAIR | PAIR_BOOL | REDUCTIONS | OTHER_PURE) - {"requires_grad_"}
#: Names of methods that tensors have; of them those that numbers, strings, lists, dicts and modules have not.
TENSOR_ONLY = PURE - _words("""
    float double half bfloat16 type to bool int long short cpu cuda sort index_select pad any all sum mean max min
    round view where cat stack tensor normalize linear embedding
""") | _words("sum mean any all max min item tolist size dim view detach_ requires_grad_ backward masked_fill_")
#: They return several tensors, or one, depending on their arguments.
MAYBE_SEVERAL = _words("max min median sort topk unique cummax cummin nonzero where mode std_mean var_mean")
#: Reading these from a tensor is free of side effects and gives no tensor.
PURE_READS = _words("item tolist size dim numel stride element_size data_ptr get_device is_contiguous numpy nelement")

#: Modules whose call is a pure function of input and parameters: no state is written, no random numbers are drawn.
PURE_MODULES = _words("""
    Linear Bilinear Identity ReLU ReLU6 GELU SiLU ELU SELU CELU Mish Softplus Softsign Hardtanh Hardsigmoid Hardswish
    LeakyReLU PReLU LogSigmoid Sigmoid Tanh Softmax LogSoftmax LayerNorm GroupNorm RMSNorm Embedding Conv1d Conv2d
    Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d Flatten Unflatten AvgPool1d AvgPool2d MaxPool1d MaxPool2d
    AdaptiveAvgPool1d AdaptiveAvgPool2d ZeroPad2d Upsample PixelShuffle CosineSimilarity
""")

#: Functions of `math` that torch has under the same name and meaning, for tensors.
MATH = {name: name for name in _words("""
    exp expm1 exp2 log log2 log10 log1p sqrt sin cos tan sinh cosh tanh asin acos atan asinh acosh atanh erf erfc
    lgamma isnan isinf isfinite hypot atan2 fabs
""")} | {"fabs": "abs"}  # fmt: skip
#: Functions of `numpy` of one array (or two) that torch has with the same meaning, dtype and defaults.
NUMPY = {name: name for name in _words("""
    sqrt exp log log2 log10 log1p expm1 sin cos tan tanh sinh cosh abs absolute sign floor ceil square maximum minimum
    where isnan isinf isfinite matmul dot outer cumsum stack arctan2 power clip real imag conj
    logical_and logical_or logical_not logical_xor arcsin arccos arctan sinc trunc rint ravel
""")} | {
    "power": "pow", "rint": "round", "concatenate": "cat", "expand_dims": "unsqueeze", "transpose": "t",
    "linalg.norm": "linalg.norm", "linalg.det": "linalg.det", "linalg.inv": "linalg.inv",
    "linalg.solve": "linalg.solve",
    "zeros_like": "zeros_like", "ones_like": "ones_like", "einsum": "einsum", "trace": "trace", "tril": "tril",
    "triu": "triu", "allclose": "allclose", "array_equal": "equal",
}  # fmt: skip

#: Calls that only tell or wait: what they return is not wanted and leaving them out changes no result.
TELLING = _words("""
    builtins.print warnings.warn warnings.warn_explicit pprint.pprint pprint.pp rich.print sys.stdout.write
    sys.stderr.write sys.stdout.flush sys.stderr.flush sys.stdout.writelines sys.stderr.writelines
    traceback.print_stack traceback.print_exc traceback.print_exception
    logging.debug logging.info logging.warning logging.warn logging.error logging.critical logging.log
    logging.exception tqdm.tqdm.write tqdm.auto.tqdm.write wandb.log wandb.summary.update mlflow.log_metric
    mlflow.log_metrics click.echo gc.collect torch.cuda.synchronize torch.cuda.empty_cache
    torch.cuda.reset_peak_memory_stats torch.cuda.reset_max_memory_allocated torch.mps.synchronize
    torch.cuda.nvtx.range_push torch.cuda.nvtx.range_pop torch.cuda.nvtx.mark faulthandler.dump_traceback
    loguru.logger.debug loguru.logger.info loguru.logger.warning loguru.logger.error
    loguru.logger.success loguru.logger.critical loguru.logger.trace
""")
#: Methods of loggers, and of the writers of TensorBoard and its like.
LOGGER_METHODS = _words("debug info warning warn error exception critical fatal log warning_once warn_once info_once")
WRITER_METHODS = _words("""
    add_scalar add_scalars add_histogram add_image add_images add_text add_figure add_graph add_embedding
    log_metric log_metrics log_scalar
""")
#: Calls that may stand in the arguments of a telling call and be left out with it.
HARMLESS = _words("""
    builtins.len builtins.str builtins.repr builtins.format builtins.round builtins.float builtins.int builtins.bool
    builtins.type builtins.id builtins.tuple builtins.list builtins.dict builtins.set builtins.sum builtins.min
    builtins.max builtins.abs builtins.sorted builtins.isinstance builtins.hasattr builtins.range builtins.enumerate
    builtins.zip builtins.any builtins.all builtins.hex builtins.callable
    time.time time.perf_counter time.monotonic time.process_time time.time_ns time.perf_counter_ns time.strftime
    time.ctime time.asctime time.localtime time.gmtime datetime.datetime.now datetime.datetime.utcnow
    datetime.date.today os.getpid os.getenv os.environ.get os.getcwd os.path.basename os.path.join
    threading.get_ident threading.current_thread socket.gethostname platform.node uuid.uuid4 uuid.uuid1
    sys.getsizeof sys.getrefcount inspect.stack inspect.currentframe traceback.format_exc traceback.format_stack
    torch.is_tensor torch.get_default_dtype torch.cuda.memory_allocated torch.cuda.max_memory_allocated
    torch.cuda.memory_reserved torch.cuda.current_device torch.cuda.get_device_name torch.get_rng_state
    torch.distributed.get_rank torch.distributed.get_world_size gc.get_count resource.getrusage
    numpy.array numpy.asarray numpy.mean numpy.std numpy.sum numpy.max numpy.min numpy.round
    math.sqrt math.log math.exp math.isnan math.isfinite copy.deepcopy copy.copy json.dumps pprint.pformat
""")
#: Methods of strings, numbers, dicts, dates and tensors that change nothing.
HARMLESS_METHODS = (
    PURE
    | PURE_READS
    | _words("""
    format join upper lower strip lstrip rstrip split replace ljust rjust center title zfill startswith endswith
    items keys values get isoformat strftime timestamp total_seconds hex copy count index as_integer_ratio
    tobytes astype decode encode
""")
)
#: Calls whose value cannot change while a process runs.
CONSTANT_CALLS = _words("""
    os.cpu_count os.uname socket.gethostname socket.getfqdn platform.node platform.system platform.machine
    platform.python_version platform.platform getpass.getuser pathlib.Path.home sys.getdefaultencoding
    torch.cuda.is_available torch.cuda.device_count torch.cuda.get_device_capability torch.cuda.get_device_name
    torch.cuda.get_device_properties importlib.metadata.version multiprocessing.cpu_count sysconfig.get_platform
    time.get_clock_info locale.getpreferredencoding
""")
#: Operators whose output's size depends on data, and is a symbol with `capture_dynamic_output_shape_ops`.
SYMBOLIC_SIZE = _words("nonzero argwhere unique unique_consecutive masked_select where repeat_interleave index_put")
#: Positions in calls that take a size or an index: the scalar is a shape there.
SHAPE_TAKERS = _words("""
    zeros ones full empty rand randn arange linspace eye reshape view expand repeat narrow split chunk unflatten
    new_zeros new_ones new_empty new_full tile select index_select roll unfold topk one_hot pad interpolate
    repeat_interleave tril triu
""")
